"""Phases of a run: `phase to_32k { … }` in a run continues the phase before it with some keys changed.

Each phase is resolved as a run of its own, RUN.PHASE; the run's own keys are its first phase, with the name of the run.
`train.within` holds the facts about earlier phases that a phase needs: the number of their steps and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dsl.closed_forms.ramp import Size
from dsl.resolve.blocks import field
from dsl.resolve.context import Context, RejectedError, suggest
from dsl.resolve.derive import own_ramp, peek, total_tokens
from dsl.resolve.files import Definitions
from dsl.resolve.merge import PHASE, label_of, merge
from dsl.resolve.override import override
from dsl.schema import Node, PhaseWithin
from dsl.schema.train import MAX_PHASES
from dsl.text.syntax import Attribute, Block, Statement, Word

SEPARATOR = "."  # of RUN.PHASE
FIXED_KEYS = ("data", "adapter", "metrics")  # keys of a run that no phase may change, except the weights of sources
FIXED_TRAIN_KEYS = ("optimizer", "seed", "initial", "ema")
GRPO = "grpo"
# Keys of a model that affect its training or RoPE, but not its weights.
_RECIPE = frozenset({"name", "init_std", "rope", "balance", "weight"})


def phases_of(definitions: Definitions, run: str) -> tuple[str, ...]:
    """Names of the phases of a run: the name of the run for the first phase, then RUN.PHASE."""
    head = definitions.blocks["run", run]
    try:
        block = Context(definitions, head, field).silent_copy().block("run", run, head.head)
    except RejectedError:
        return (run,)
    return (run, *(f"{run}{SEPARATOR}{label_of(phase)}" for phase in _phases(block)))


def run_of(definitions: Definitions, name: str) -> str:
    """The run of a phase; `name` is that of a run or of a phase."""
    return name if ("run", name) in definitions.blocks else name.partition(SEPARATOR)[0]


def _phases(run: Block) -> list[Block]:
    named = (statement for statement in run.body if isinstance(statement, Block) and statement.key.text == PHASE)
    return [phase for phase in named if label_of(phase).isidentifier() and len(phase.labels) == 1]


def enter(context: Context, name: str, overrides: Sequence[str]) -> None:
    """Replace the run of a context by the named phase, with the overrides of the command line.

    `-s phase.NAME.key` sets a key of one phase, `-s key` sets it in all phases.
    """
    of_phases = [text for text in overrides if text.lstrip().startswith(f"{PHASE}{SEPARATOR}")]
    for text in of_phases:
        override(context, text)
    shared = [text for text in overrides if text not in of_phases]
    phases = _phases(context.run)
    for statement in (
        statement for statement in context.run.body if isinstance(statement, Block) and statement.key.text == PHASE
    ):
        if statement not in phases:
            context.complain("E0205", "`phase` needs one name", statement.head, "write `phase long { … }`")
            context.run = replace(context.run, body=tuple(item for item in context.run.body if item is not statement))
    if not phases:
        for text in shared:
            override(context, text)
        return
    _check_keys(context, phases)
    runs = [*_runs(context.run, phases, context)]
    names = [context.run.labels[0].span.text, *map(label_of, phases)]
    number = 0 if ("run", name) in context.definitions.blocks else names.index(name.partition(SEPARATOR)[2], 1)
    contexts = [_phase_context(context, run, shared) for run in runs]
    context.run = runs[number]
    for text in shared:
        override(context, text)
    try:
        _set_position(context, contexts, phases, number)
        _check_model(context, contexts[0])
    except RejectedError:  # the mistake is reported with the phase that has it
        context.failed.add("train.within")


def _runs(run: Block, phases: Sequence[Block], context: Context) -> Iterator[Block]:
    """Yield the run of each phase: the run of the phase before, with the keys of the phase merged over it."""
    label = run.labels[0]
    body = tuple(statement for statement in run.body if statement not in phases)
    merged = replace(run, body=body)
    yield merged
    for phase in phases:
        name = Word(f"{label.span.text}{SEPARATOR}{label_of(phase)}", label.span)
        child = Block(run.key, (), None, phase.body, phase.head, phase.end)
        merged = replace(merge(merged, child, context.mistakes), labels=(name,))
        yield merged


def _phase_context(context: Context, run: Block, overrides: Sequence[str]) -> Context:
    """Return a silent context for one phase."""
    silent = context.silent_copy()
    silent.definitions, silent.run = replace(silent.definitions, sources=[]), run
    for text in overrides:
        override(silent, text)
    return silent


def _set_position(context: Context, contexts: Sequence[Context], phases: Sequence[Block], number: int) -> None:
    """Compute the position of a phase in its run."""
    sizes: tuple[Size, ...] = ()
    step = token = 0
    for index, phase_context in enumerate(contexts[: number + 1]):
        if index and _sets_rate(phases[index - 1], context.run):
            context.rate_begin = token
        if index == number:
            break
        ramp, tokens = own_ramp(phase_context), total_tokens(phase_context)
        if ramp is None or tokens is None:
            raise RejectedError
        steps = ramp.steps_for(tokens)
        truncated = replace(ramp, sizes=tuple(size for size in ramp.sizes if size.first_step < steps))
        sizes = truncated.with_earlier_sizes(sizes, step, token).sizes
        step, token = step + steps, token + ramp.tokens_at(steps)
    context.earlier_sizes = sizes
    longest = max(peek(phase_context, "train.sequence") for phase_context in contexts)
    context.within = PhaseWithin.model_construct(
        number=number + 1, phases=len(contexts), first_step=step, first_token=token, longest=longest
    )


def _sets_rate(phase: Block, run: Block) -> bool:
    """Whether the learning rate of a run comes from this phase."""
    rates = [
        [statement for statement in _statements_in(block, "train") if statement.key.text == "rate"]
        for block in (phase, run)
    ]
    return bool(rates[0]) and rates[0] == rates[1]


def _statements_in(block: Block, key: str) -> Iterator[Attribute | Block]:
    for statement in block.body:
        if isinstance(statement, Block) and statement.key.text == key:
            yield from (item for item in statement.body if isinstance(item, (Attribute, Block)))


def _check_keys(context: Context, phases: Sequence[Block]) -> None:
    """Report keys in phases that only the whole run may set."""
    for phase in phases[MAX_PHASES - 1 :]:
        context.complain("E0708", f"a run has at most {MAX_PHASES} phases", phase.head, "remove this phase")
    for phase in phases:
        misplaced = [part for statement in phase.body for part in _whole_run_keys(statement)]
        misplaced += [
            statement for statement in _statements_in(phase, "train") if statement.key.text in FIXED_TRAIN_KEYS
        ]
        for statement in misplaced:
            message = f"`{statement.key.text}` belongs to the whole run, and no phase can change it"
            context.complain("E0708", message, statement.key.span, "move it out of the phase")
        grpo = [
            statement
            for block in (context.run, phase)
            for statement in _statements_in(block, "train")
            if statement.key.text == GRPO
        ]
        if any(isinstance(statement, Block) for statement in grpo):
            hint = "make the phase a run of its own, whose `initial` is the run before"
            context.complain("E1008", "a run with `grpo` cannot have phases", phase.head, hint)


def _whole_run_keys(statement: Statement) -> Iterator[Attribute | Block]:
    """Yield a statement if only the whole run may set its key; of `data`, yield everything except the weights of
    sources.
    """
    if not isinstance(statement, (Attribute, Block)) or statement.key.text not in FIXED_KEYS:
        return
    if not isinstance(statement, Block) or statement.key.text != "data":
        yield statement
        return
    for key in statement.body:
        if isinstance(key, Block) and key.key.text == "sources":
            sources = [source for source in key.body if isinstance(source, Block)]
            settings = (
                setting for source in sources for setting in source.body if isinstance(setting, (Attribute, Block))
            )
            yield from (setting for setting in settings if setting.key.text != "weight")
        elif isinstance(key, (Attribute, Block)):
            yield key


def _check_model(context: Context, first: Context) -> None:
    """Report a phase whose model differs from that of the first phase in its weights or computations."""
    named = next(
        (
            statement
            for statement in context.run.body
            if isinstance(statement, Attribute) and statement.key.text == "model"
        ),
        None,
    )
    if named is not None and _weights(peek(first, "model")) != _weights(peek(context, "model")):
        message = f"`{named.phrase.span.text}` differs from the model of the earlier phases in more than `rope`"
        hint = "let it extend the model of the earlier phases, and give it `attention { rope { … } }`"
        context.complain("E0708", message, named.phrase.span, hint)


def _weights(value: Any) -> Any:
    """The part of a model that determines its weights and computations, without RoPE."""
    if isinstance(value, Node):
        return type(value), {name: _weights(field_value) for name, field_value in value if name not in _RECIPE}
    return tuple(map(_weights, value)) if isinstance(value, tuple) else value


def report_unknown(definitions: Definitions, file: str, name: str) -> None:
    """Report a phase that a run does not have."""
    run, _, phase = name.partition(SEPARATOR)
    names = [phase_name.partition(SEPARATOR)[2] for phase_name in phases_of(definitions, run)[1:]]
    hint = suggest(phase, names, PHASE) if names else "add `phase long { train { sequence = 32_768 } }`"
    definitions.complain("E0404", f"run `{run}` of {file} has no phase `{phase}`", None, hint)


__all__ = ["SEPARATOR", "enter", "phases_of", "report_unknown", "run_of"]

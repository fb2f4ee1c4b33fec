"""Phases of a run: `phase to_32k { … }` in a run changes what the phase before has, from where that one ends.

Each phase is a run by itself, under the name RUN.PHASE; the run's own keys are its first phase, under the name of the
run. What a phase needs of those before it, the number of their steps and tokens, is in its `train.within`.
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
WHOLE = ("data", "adapter", "metrics")  # keys of a run that no phase changes, but for the weights of sources
WHOLE_OF_TRAIN = ("optimizer", "seed", "initial", "ema")
GRPO = "grpo"
# Keys of a model that say how it is trained, or with which rotation, and not which weights it has.
_RECIPE = frozenset({"name", "init_std", "rope", "balance", "weight"})


def phases_of(definitions: Definitions, run: str) -> tuple[str, ...]:
    """The names by which the phases of a run are chosen: of its first one the run's, then RUN.PHASE."""
    head = definitions.blocks["run", run]
    try:
        block = Context(definitions, head, field).silent().block("run", run, head.head)
    except RejectedError:
        return (run,)
    return (run, *(f"{run}{SEPARATOR}{label_of(each)}" for each in _phases(block)))


def run_of(definitions: Definitions, name: str) -> str:
    """The run that a phase is of, by the name of either."""
    return name if ("run", name) in definitions.blocks else name.partition(SEPARATOR)[0]


def _phases(run: Block) -> list[Block]:
    named = (each for each in run.body if isinstance(each, Block) and each.key.text == PHASE)
    return [each for each in named if label_of(each).isidentifier() and len(each.labels) == 1]


def enter(context: Context, name: str, overrides: Sequence[str]) -> None:
    """Make the run of a context the phase of this name, with everything that is set on the command line.

    `-s phase.NAME.key` sets a key of one phase, `-s key` that of all.
    """
    of_phases = [text for text in overrides if text.lstrip().startswith(f"{PHASE}{SEPARATOR}")]
    for text in of_phases:
        override(context, text)
    others = [text for text in overrides if text not in of_phases]
    phases = _phases(context.run)
    for each in (each for each in context.run.body if isinstance(each, Block) and each.key.text == PHASE):
        if each not in phases:
            context.complain("E0205", "`phase` has one name", each.head, "write `phase long { … }`")
            context.run = replace(context.run, body=tuple(item for item in context.run.body if item is not each))
    if not phases:
        for text in others:
            override(context, text)
        return
    _check(context, phases)
    runs = [*_runs(context.run, phases, context)]
    names = [context.run.labels[0].span.text, *map(label_of, phases)]
    number = 0 if ("run", name) in context.definitions.blocks else names.index(name.partition(SEPARATOR)[2], 1)
    contexts = [_apart(context, run, others) for run in runs]
    context.run = runs[number]
    for text in others:
        override(context, text)
    try:
        _place(context, contexts, phases, number)
        _check_model(context, contexts[0])
    except RejectedError:  # what it is made of is reported where that phase is looked at
        context.failed.add("train.within")


def _runs(run: Block, phases: Sequence[Block], context: Context) -> Iterator[Block]:
    """The run of each phase: the one before, and over it what the phase says."""
    label = run.labels[0]
    body = tuple(each for each in run.body if each not in phases)
    found = replace(run, body=body)
    yield found
    for phase in phases:
        name = Word(f"{label.span.text}{SEPARATOR}{label_of(phase)}", label.span)
        over = Block(run.key, (), None, phase.body, phase.head, phase.end)
        found = replace(merge(found, over, context.mistakes), labels=(name,))
        yield found


def _apart(context: Context, run: Block, overrides: Sequence[str]) -> Context:
    """A context that looks at one phase silently."""
    found = context.silent()
    found.definitions, found.run = replace(found.definitions, sources=[]), run
    for text in overrides:
        override(found, text)
    return found


def _place(context: Context, contexts: Sequence[Context], phases: Sequence[Block], number: int) -> None:
    """Say where a phase is in its run."""
    sizes: tuple[Size, ...] = ()
    step = token = 0
    for index, each in enumerate(contexts[: number + 1]):
        if index and _says_rate(phases[index - 1], context.run):
            context.rate_begin = token
        if index == number:
            break
        ramp, tokens = own_ramp(each), total_tokens(each)
        if ramp is None or tokens is None:
            raise RejectedError
        steps = ramp.steps_for(tokens)
        shown = replace(ramp, sizes=tuple(size for size in ramp.sizes if size.first_step < steps))
        sizes = shown.behind(sizes, step, token).sizes
        step, token = step + steps, token + ramp.tokens_at(steps)
    context.before = sizes
    longest = max(peek(each, "train.sequence") for each in contexts)
    context.within = PhaseWithin.model_construct(
        number=number + 1, phases=len(contexts), first_step=step, first_token=token, longest=longest
    )


def _says_rate(phase: Block, run: Block) -> bool:
    """Whether the rate of a run is the one that a phase says."""
    rates = [[each for each in _inside(block, "train") if each.key.text == "rate"] for block in (phase, run)]
    return bool(rates[0]) and rates[0] == rates[1]


def _inside(block: Block, key: str) -> Iterator[Attribute | Block]:
    for each in block.body:
        if isinstance(each, Block) and each.key.text == key:
            yield from (item for item in each.body if isinstance(item, (Attribute, Block)))


def _check(context: Context, phases: Sequence[Block]) -> None:
    """Report what a phase says that is of the whole run."""
    for phase in phases[MAX_PHASES - 1 :]:
        context.complain("E0708", f"a run has at most {MAX_PHASES} phases", phase.head, "remove this phase")
    for phase in phases:
        own = [part for each in phase.body for part in _of_the_run(each)]
        own += [each for each in _inside(phase, "train") if each.key.text in WHOLE_OF_TRAIN]
        for each in own:
            message = f"`{each.key.text}` is that of the whole run, and no phase changes it"
            context.complain("E0708", message, each.key.span, "move it out of the phase")
        own = [each for block in (context.run, phase) for each in _inside(block, "train") if each.key.text == GRPO]
        if any(isinstance(each, Block) for each in own):
            hint = "make the phase a run of its own, whose `initial` is the run before"
            context.complain("E1008", "a run that learns from rewards has no phases", phase.head, hint)


def _of_the_run(statement: Statement) -> Iterator[Attribute | Block]:
    """The statement, if its key is that of the whole run; of `data`, what it says beside the weights of sources."""
    if not isinstance(statement, (Attribute, Block)) or statement.key.text not in WHOLE:
        return
    if not isinstance(statement, Block) or statement.key.text != "data":
        yield statement
        return
    for key in statement.body:
        if isinstance(key, Block) and key.key.text == "sources":
            sources = [each for each in key.body if isinstance(each, Block)]
            said = (each for source in sources for each in source.body if isinstance(each, (Attribute, Block)))
            yield from (each for each in said if each.key.text != "weight")
        elif isinstance(key, (Attribute, Block)):
            yield key


def _check_model(context: Context, first: Context) -> None:
    """Report a phase whose model has other weights than that of the first phase, or computes otherwise with them."""
    named = next((each for each in context.run.body if isinstance(each, Attribute) and each.key.text == "model"), None)
    if named is not None and _weights(peek(first, "model")) != _weights(peek(context, "model")):
        message = f"`{named.phrase.span.text}` is another model than that of the phases before: only `rope` may differ"
        hint = "let it extend the model of the phases before, and give it `attention { rope { … } }`"
        context.complain("E0708", message, named.phrase.span, hint)


def _weights(value: Any) -> Any:
    """What a model's weights and computations hang on, but for the rotation."""
    if isinstance(value, Node):
        return type(value), {name: _weights(each) for name, each in value if name not in _RECIPE}
    return tuple(map(_weights, value)) if isinstance(value, tuple) else value


def unknown(definitions: Definitions, file: str, name: str) -> None:
    """Report that a run has no such phase."""
    run, _, phase = name.partition(SEPARATOR)
    names = [each.partition(SEPARATOR)[2] for each in phases_of(definitions, run)[1:]]
    hint = suggest(phase, names, PHASE) if names else "add `phase long { train { sequence = 32_768 } }`"
    definitions.complain("E0404", f"run `{run}` of {file} has no phase `{phase}`", None, hint)


__all__ = ["SEPARATOR", "enter", "phases_of", "run_of", "unknown"]

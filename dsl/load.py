"""Load a spec from a path: `load("specs/quickstart.dsc")`. Reading files is its only side effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from dsl import rules
from dsl.messages.diagnostics import Diagnostic, Note, Source, Span, SpecError, in_order
from dsl.resolve import phases
from dsl.resolve.blocks import field, node
from dsl.resolve.chosen import choose, phases_of, runs_of, split
from dsl.resolve.context import Context, RejectedError, Scope
from dsl.resolve.files import Definitions, Reader, collect, read
from dsl.resolve.override import edit_definitions, edit_overrides, rename_keys
from dsl.resolve.unused import check_lets, unknown_units
from dsl.rules.finding import Finding
from dsl.schema import Spec, choices
from dsl.schema.base import fields_of
from dsl.text.syntax import Block, Word

MAX_RESPELLED = 3  # rounds of correcting misspelt block keys; each may reveal further ones inside
MAX_CHOICES = 2000  # choices tried for keys that are `auto`, about a millisecond each
MAX_EXPLAINED = 16  # runs and blocks of a file whose conflicts and misspelt blocks are explained, about 30 ms each


@dataclass(frozen=True)
class ResolvedSpec:
    """A spec, and the position of each of its values: path ("parallel.pipeline") → span."""

    spec: Spec
    origins: Mapping[str, Span]
    sources: tuple[Source, ...]  # the files read, then the overrides
    opened: tuple[str, ...] = ()  # keys that are `auto`; the spec has the first values that pass the rules


@dataclass(frozen=True)
class ResolvedView:
    """One run of a file, or one block that no run uses, as far as it could be resolved."""

    spec: Spec  # without the values that failed
    context: Context  # origins: path → position of its value


@dataclass(frozen=True)
class Analysis:
    """The result of analysing a file, with or without mistakes."""

    definitions: Definitions
    views: tuple[ResolvedView, ...]
    diagnostics: tuple[Diagnostic, ...]  # in source order


def load(path: str | Path, run: str | None = None, overrides: Iterable[str] = ()) -> Spec:
    """Return the spec of a run in a file. `path` may end in `:RUN`; `overrides` are `key=value` as on the command line.

    Raises SpecError with all mistakes, in source order.
    """
    return resolve(path, run, overrides).spec


def resolve(path: str | Path, run: str | None = None, overrides: Iterable[str] = ()) -> ResolvedSpec:
    """Load a run of a spec like `load`, and return it with the origin of each value."""
    file, run = split(str(path), run)
    definitions = collect(file)
    name = choose(definitions, file, run)
    view, mistakes = _view(definitions, name, tuple(overrides)) if name else (None, [])
    diagnostics = _all_mistakes_in_order(definitions, mistakes)
    if not diagnostics and view is not None and view.context.failed:  # an earlier phase is wrong
        diagnostics = check(file, phases.run_of(definitions, name), overrides)
    if diagnostics or view is None or view.context.failed:
        raise SpecError(diagnostics)
    return ResolvedSpec(view.spec, view.context.origins, tuple(definitions.sources), tuple(view.context.chosen))


def alternatives(
    path: str | Path, run: str | None = None, overrides: Iterable[str] = ()
) -> Iterator[tuple[choices.Choice, Spec]]:
    """Yield every choice of the joint `auto` keys that passes the rules, with its spec.

    Other open keys have their first value; all of their `choices.values` pass the rules too. Yields nothing if no key
    is open, or if the spec is wrong.
    """
    file, run = split(str(path), run)
    definitions = collect(file)
    name = choose(definitions, file, run)
    texts = tuple(overrides)
    view = _run_view(definitions, name, texts, False, (), {})[0] if name else None
    if view is None or not view.context.opened:
        return
    for choice in _structures(view):
        resolved, mistakes = _run_view(definitions, name, texts, False, (), choice)
        if resolved is not None and not mistakes:
            yield choice, resolved.spec


def variants(
    path: str | Path, run: str | None = None, overrides: Iterable[str] = (), chosen: choices.Choice | None = None
) -> Callable[[Iterable[str]], Spec | None]:
    """Return a function from further overrides to the spec of a run, or to None if it breaks a rule. Files are read
    once.

    `chosen`: values of the keys that are `auto`.
    """
    file, run = split(str(path), run)
    definitions = collect(file)
    name, texts = choose(definitions, file, run), tuple(overrides)

    def variant(further_overrides: Iterable[str]) -> Spec | None:
        if not name:
            return None
        view, mistakes = _run_view(definitions, name, (*texts, *further_overrides), False, (), chosen or {})
        return None if view is None or mistakes or view.context.failed else view.spec

    return variant


def check(path: str | Path, run: str | None = None, overrides: Iterable[str] = ()) -> tuple[Diagnostic, ...]:
    """Return all mistakes in one run or phase of a file; by default, in all runs and in the blocks that no run uses."""
    file, run = split(str(path), run)
    return analyse(file, run, overrides).diagnostics


def analyse(path: str, run: str | None = None, overrides: Iterable[str] = (), reader: Reader = read) -> Analysis:
    """Resolve the runs and blocks of a file and collect all mistakes. `reader` returns the texts of files, as in an
    editor."""
    definitions = collect(path, reader)
    names = runs_of(definitions) if run is None else (run,)
    wanted = [phase for name in names for phase in phases_of(definitions, path, name)]
    results = [_view(definitions, name, tuple(overrides), index < MAX_EXPLAINED) for index, name in enumerate(wanted)]
    if run is None:
        unused = _unused_blocks(definitions, [view for view, _ in results if view])
        results += [
            block_view(definitions, *key, len(wanted) + offset < MAX_EXPLAINED) for offset, key in enumerate(unused)
        ]
    if not names and not definitions.of_first_file:
        choose(definitions, path, run)
    mistakes = [*{(item.code, item.span): item for _, items in reversed(results) for item in reversed(items)}.values()]
    return Analysis(
        definitions,
        tuple(view for view, _ in results if view is not None),
        _all_mistakes_in_order(definitions, mistakes),
    )


def _all_mistakes_in_order(definitions: Definitions, mistakes: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """All mistakes in source order, including numbers with unknown units that no value uses."""
    reported = (*definitions.mistakes, *mistakes)
    items = in_order((*reported, *unknown_units(definitions, reported)), definitions.sources)
    return tuple(_set_leaves_others(item, items) for item in items)


def _set_leaves_others(item: Diagnostic, items: Iterable[Diagnostic]) -> Diagnostic:
    """Return a message whose conflict states whether other messages remain after its fix."""
    if item.conflict is None:
        return item
    has_others = any((message.code, message.span) not in item.conflict.mends for message in items)
    return replace(item, conflict=replace(item.conflict, leaves_others=has_others))


def _unused_blocks(definitions: Definitions, views: Iterable[ResolvedView]) -> list[tuple[str, str]]:
    """The models, clusters and precisions of a file that no run uses and, if there are runs, no block extends."""
    runs, defined = runs_of(definitions), dict.fromkeys(definitions.of_first_file)
    if runs and definitions.broken:
        return []  # no run could be resolved
    used = {key for view in views for key in view.context.extended}
    if runs:
        used |= {(kind, block.parent.text) for (kind, _), block in definitions.blocks.items() if block.parent}
    return [key for key in defined if key[0] != "run" and key not in used]


def refusals(analysis: Analysis) -> tuple[Diagnostic, ...]:
    """Return warnings about settings that `dsc train` refuses, in the runs of a file without mistakes."""
    if analysis.diagnostics:
        return ()
    runs = [view for view in analysis.views if hasattr(view.spec, "train")]  # the others are single blocks
    warnings = [item for view in runs for item in rules.train_refusals(view.spec, view.context.origins)]
    return tuple(dict.fromkeys((*warnings, *(item for view in runs for item in _missing_tokenizer(view)))))


def _missing_tokenizer(view: ResolvedView) -> Iterator[Diagnostic]:
    """Warn about a tokenizer such as `"gpt2"`: nothing is downloaded, so it must be a file, and there is none. A path
    with a folder or `.json` gets no warning, since the file may only exist where the run starts."""
    name, span = view.spec.data.tokenizer, view.context.origins.get("data.tokenizer")
    if not isinstance(name, str) or "/" in name or name.endswith(".json"):
        return
    try:
        is_there = (Path(view.context.definitions.home) / name).exists()
    except (OSError, ValueError):
        is_there = False
    if not is_there:
        hint = 'write `tokenizer = train(4096)`, or the path of a file, as in `"tokenizer.json"`'
        yield Diagnostic("E1005", f'there is no tokenizer file "{name}"', span, hint, severity="warning")


def block_view(
    definitions: Definitions, kind: str, name: str, explain: bool = True, reported: Reported = ()
) -> tuple[ResolvedView, list[Diagnostic]]:
    """Resolve one model, cluster or precision that no run uses."""
    kinds = fields_of(Spec)
    block = definitions.blocks[kind, name]
    context = Context(definitions, Block(Word("run", block.head), (), None, (), block.head), field)
    try:
        block = context.block(kind, name, block.head)
        built = node(context, Scope((block,), kind), kinds[kind].nodes[0], block)
    except RejectedError:
        built = None
    names = _misspelt_keys(context, explain, reported)
    if names:
        return block_view(rename_keys(definitions, context.key_corrections), kind, name, explain, (*reported, names))
    check_lets(context)
    context.mistakes += [item for items in reported for item in items]
    absent = set(kinds) - {kind} if built is not None else set(kinds)
    context.failed |= absent
    spec = Spec.model_construct(**{kind: built})

    def view_after(edits: Mapping[Span, str]) -> tuple[ResolvedView, list[Diagnostic]]:
        return block_view(edit_definitions(definitions, edits), kind, name, explain=False)

    return ResolvedView(spec, context), _rule_mistakes(spec, context, view_after if explain else None)


Reported = tuple[tuple[Diagnostic, ...], ...]  # for each round, messages about misspelt block keys


def _misspelt_keys(context: Context, explain: bool, reported: Reported) -> tuple[Diagnostic, ...]:
    """The messages about misspelt block keys that will be corrected, so that the contents of these blocks are
    checked."""
    if not explain or len(reported) >= MAX_RESPELLED:
        return ()
    return tuple(item for item in context.mistakes if item.code == "E0201" and item.span in context.key_corrections)


def _view(
    definitions: Definitions, name: str, overrides: tuple[str, ...], explain: bool = True, reported: Reported = ()
) -> tuple[ResolvedView | None, list[Diagnostic]]:
    """Resolve one run. `auto` keys get the first choice that passes the rules, or the one that breaks the fewest."""
    view, mistakes = _run_view(definitions, name, overrides, explain, reported, {})
    if view is None or not view.context.opened:
        return view, mistakes
    best: tuple[int, choices.Choice] | None = None
    tried = 0
    for choice in islice(_structures(view), MAX_CHOICES):
        resolved, mistakes = _run_view(definitions, name, overrides, False, reported, choice)
        joint = sum(rules.depend_on_choices([item]) for item in mistakes)
        tried += 1
        if best is None or joint < best[0]:
            best = joint, choice
        if not mistakes:
            return resolved, []
        if not joint:
            break  # no other choice can fix the remaining mistakes
    resolved, mistakes = _run_view(definitions, name, overrides, explain, reported, best[1] if best else {})
    return resolved, [_add_choice_note(item, best[1], tried) if best and best[0] else item for item in mistakes]


def _add_choice_note(message: Diagnostic, choice: choices.Choice, tried: int) -> Diagnostic:
    """Add a note with the chosen values to a message that depends on them; the choice has the fewest broken rules."""
    if not rules.depend_on_choices([message]):
        return message
    chosen = ", ".join(
        f"{path.rpartition('.')[2]} = {value}" for path, value in choice.items() if path in choices.JOINT
    )
    intro = f"none of the {tried:,} choices for `auto` passes the rules; shown for" if tried > 1 else "chosen:"
    return replace(message, notes=(*message.notes, Note(f"{intro} {chosen}"))) if chosen else message


def _structures(view: ResolvedView) -> Iterator[choices.Choice]:
    """Yield the choices for the open keys of a run; none if values that they depend on are wrong."""
    try:
        yield from choices.structures(view.spec, view.context.opened)
    except AttributeError:  # the spec lacks the model, cluster or batch that decides
        return


def _run_view(
    definitions: Definitions,
    name: str,
    overrides: tuple[str, ...],
    explain: bool,
    reported: Reported,
    chosen: choices.Choice,
) -> tuple[ResolvedView | None, list[Diagnostic]]:
    """Resolve one run: merge its blocks and overrides, build the spec, and check the rules."""
    if definitions.broken:
        return None, []
    run = phases.run_of(definitions, name)
    context = Context(definitions, definitions.blocks["run", run], field, chosen=chosen)
    try:
        context.run = context.block("run", run, context.run.head)
    except RejectedError:
        return None, context.mistakes
    phases.enter(context, name, overrides)
    scope = Scope((context.run,))
    context.origins[""] = context.run.head
    spec = node(context, scope, Spec, context.run)
    names = _misspelt_keys(context, explain, reported)
    if names:
        corrected = rename_keys(definitions, context.key_corrections)
        return _run_view(corrected, name, overrides, explain, (*reported, names), chosen)
    check_lets(context)
    context.mistakes += [item for items in reported for item in items]
    if context.opened:
        return ResolvedView(spec, context), context.mistakes  # rules are checked once all values are chosen

    def view_after(edits: Mapping[Span, str]) -> tuple[ResolvedView | None, list[Diagnostic]]:
        return _run_view(
            edit_definitions(definitions, edits), name, edit_overrides(overrides, edits), False, (), chosen
        )

    return ResolvedView(spec, context), _rule_mistakes(spec, context, view_after if explain else None)


ViewAfter = Callable[[Mapping[Span, str]], tuple[ResolvedView | None, list[Diagnostic]]]


def _diagnostic_of(finding: Finding, spec: Spec, origins: Mapping[str, Span]) -> Diagnostic:
    from dsl.rules.finding import add_data_derivation  # imported only to explain a mistake

    return add_data_derivation(rules.diagnostic_of(finding, origins), finding, spec, origins)


def _rule_mistakes(spec: Spec, context: Context, view_after: ViewAfter | None) -> list[Diagnostic]:
    """Check the rules of a spec and return all its mistakes. `view_after` resolves it with some values replaced."""
    broken = rules.broken_rules(spec, context.failed)
    origins = context.origins
    findings = [(rule, finding, _diagnostic_of(finding, spec, origins)) for rule, finding in broken]
    mistakes = [*context.mistakes, *(message for _, _, message in findings)]
    if view_after is None or not rules.are_joint(mistakes):
        return mistakes
    from dsl import conflict  # imported only if lines may contradict each other

    subject = conflict.Subject(
        spec, context.origins, context.failed, context.definitions.sources, context.definitions.lets.keys(),
        lambda edits: view_after(edits)[1],
    )  # fmt: skip
    return conflict.explain_conflicts(subject, context.mistakes, findings)

"""Path to spec: `load("specs/quickstart.dsc")`. Reads files; everything behind it is pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsl import rules
from dsl.diagnostics import Diagnostic, SpecError, in_order
from dsl.parser import parse
from dsl.resolve.blocks import node
from dsl.resolve.context import Context, RejectedError, Scope, suggest
from dsl.resolve.fields import fields_of
from dsl.resolve.files import Definitions, collect
from dsl.resolve.merge import merge
from dsl.schema import Node, Spec
from dsl.source import OVERRIDE, Source, Span
from dsl.syntax import Attribute, Block, Phrase, Statement, String, Word

NAME_OR_CALL = re.compile(r"[A-Za-z_]\w*(\([^()]*\)?)?", re.ASCII)  # train(4096), also if not closed


@dataclass(frozen=True)
class Resolved:
    """A spec, and where each of its values is written: path ("parallel.pipeline") → span."""

    spec: Spec
    origins: Mapping[str, Span]
    sources: tuple[Source, ...]  # the files read, then the overrides


def load(path: str | Path, run: str | None = None, overrides: Iterable[str] = ()) -> Spec:
    """The spec of a run in a file. `path` may end in `:RUN`; `overrides` are `key=value` as on the command line.

    Raises SpecError with everything that is wrong, in source order.
    """
    return resolve(path, run, overrides).spec


def resolve(path: str | Path, run: str | None = None, overrides: Iterable[str] = ()) -> Resolved:
    """As `load`, with the origin of each value."""
    file, run = split(str(path), run)
    definitions = collect(file)
    name = _choose(definitions, file, run)
    resolved, mistakes = _resolve(definitions, name, tuple(overrides)) if name else (None, [])
    diagnostics = in_order((*definitions.mistakes, *mistakes), definitions.sources)
    if diagnostics or resolved is None:
        raise SpecError(diagnostics)
    return resolved


def check(path: str | Path, run: str | None = None, overrides: Iterable[str] = ()) -> tuple[Diagnostic, ...]:
    """Everything wrong with a file: with one run of it, with all of them, or with the blocks of a file without runs."""
    file, run = split(str(path), run)
    definitions = collect(file)
    names = runs_of(definitions) if run is None else (_choose(definitions, file, run),)
    mistakes: list[Diagnostic] = []
    for name in names:
        if name:
            mistakes += _resolve(definitions, name, tuple(overrides))[1]
    if not names and definitions.own:
        mistakes += _library(definitions)
    elif not names:
        _choose(definitions, file, run)
    return in_order((*definitions.mistakes, *mistakes), definitions.sources)


def _library(definitions: Definitions) -> list[Diagnostic]:
    """What is wrong with the models, clusters and precisions of a file that has no run."""
    mistakes: list[Diagnostic] = []
    kinds = fields_of(Spec)
    for kind, name in dict.fromkeys(definitions.own):
        block = definitions.blocks[kind, name]
        context = Context(definitions, Block(Word("run", block.head), (), None, (), block.head))
        try:
            block = context.block(kind, name, block.head)
            built = node(context, Scope((block,), kind), kinds[kind].nodes[0], block)
        except RejectedError:
            built = None
        absent = set(kinds) - {kind} if built is not None else set(kinds)
        spec = Spec.model_construct(**{kind: built})
        mistakes += [*context.mistakes, *rules.check(spec, context.origins, context.failed | absent)]
    return mistakes


def find(folder: str | Path = ".") -> Path:
    """The one spec of a folder: the `.dsc` file with a run block. Raises SpecError if there is none, or several."""
    names = sorted(path for path in Path(folder).glob("*.dsc") if path.is_file())
    specs = [path for path in names if runs_of(collect(str(path)))]
    if len(specs) == 1:
        return specs[0]
    if specs:
        listed = ", ".join(str(path) for path in specs)
        raise SpecError([Diagnostic("E0404", f"several specs are here: {listed}", hint=f"name one: `{specs[0]}`")])
    message = "there is no spec here: a .dsc file with a run block"
    raise SpecError([Diagnostic("E0404", message, hint="name a spec, or go to its folder")])


def split(path: str, run: str | None = None) -> tuple[str, str | None]:
    """`SPEC:RUN` to its parts; a file of that very name is meant first."""
    head, colon, name = path.rpartition(":")
    if run is None and colon and name.isidentifier() and not Path(path).exists():
        return head, name
    return path, run


def runs_of(definitions: Definitions) -> tuple[str, ...]:
    """The runs that a file itself defines."""
    return tuple(dict.fromkeys(name for kind, name in definitions.own if kind == "run"))


def runs_in(path: str | Path) -> tuple[str, ...]:
    """The names of the runs of a file."""
    return runs_of(collect(str(path)))


def _choose(definitions: Definitions, file: str, run: str | None) -> str:
    """The run that is meant, or "" if that is not known; why is then among the mistakes."""
    runs = runs_of(definitions)
    if run is not None:
        if ("run", run) in definitions.blocks:
            return run
        definitions.complain("E0404", f"{file} has no run `{run}`", None, suggest(run, runs, "run"))
        return ""
    if len(runs) == 1:
        return runs[0]
    if runs:
        listed = ", ".join(f"`{file}:{name}`" for name in runs)
        definitions.complain("E0404", f"{file} has several runs", None, f"name one: {listed}")
    elif not definitions.broken and not definitions.damaged:
        hint = "add `run pretrain { model = …, cluster = … }`"
        definitions.complain("E0404", f"{file} has no run block", None, hint)
    return ""


def _resolve(
    definitions: Definitions, name: str, overrides: tuple[str, ...]
) -> tuple[Resolved | None, list[Diagnostic]]:
    """One run: its blocks inherited and overridden, then typed, then held against the rules."""
    if definitions.broken:
        return None, []
    context = Context(definitions, definitions.blocks["run", name])
    try:
        context.run = context.block("run", name, context.run.head)
    except RejectedError:
        return None, context.mistakes
    for text in overrides:
        _override(context, text)
    scope = Scope((context.run,))
    context.origins[""] = context.run.head
    spec = node(context, scope, Spec, context.run)
    mistakes = [*context.mistakes, *rules.check(spec, context.origins, context.failed)]
    complete = not mistakes and not context.failed
    return (Resolved(spec, context.origins, tuple(definitions.sources)) if complete else None), mistakes


# ---------------------------------------------------------------- the command line


def _override(context: Context, text: str) -> None:
    """`-s parallel.pipeline=8`: a later block with just that value."""
    source = Source(OVERRIDE, text)
    context.definitions.sources.append(source)
    key, _, value = text.partition("=")
    statement: Statement | None = None
    if value.strip() and all(part.isidentifier() for part in key.strip().split(".")):
        if _takes_text(key.strip()) and _is_plain(value):
            span = Span(source, len(key) + 1, len(text))
            word = Word(key.strip(), Span(source, 0, len(key)))
            statement = Attribute(word, Phrase((String(value.strip(), span),), span), span)
        else:
            parsed = parse(source)
            if parsed.diagnostics:
                context.mistakes += parsed.diagnostics
                return
            statement = parsed.document.body[0] if len(parsed.document.body) == 1 else None
    if not isinstance(statement, Attribute):
        span = Span(source, 0, max(1, len(text)))
        context.complain("E0504", f"`{text}` is not key=value", span, "write `-s parallel.pipeline=8`")
        return
    kind, *rest = statement.key.text.split(".")
    if kind in ("model", "cluster", "precision") and rest:
        _override_named(context, kind, rest, statement)
    else:
        context.run = _put(context, context.run, [kind, *rest], statement)


def _takes_text(key: str) -> bool:
    """Whether a key of the run, as it is nested, is one whose value is a text, like `data.source`."""
    *parents, name = key.split(".")
    cls: type[Node] = Spec
    for part in parents:
        kind = fields_of(cls).get(part)
        if kind is None or not kind.nodes:
            return False
        cls = kind.nodes[0]
    kind = fields_of(cls).get(name)
    return kind is not None and str in kind.types and kind.form != "label"


def _is_plain(value: str) -> bool:
    """Whether a text stands as it is, a shell having taken its quotes: not a name, a call or in quotes still."""
    text = value.strip()
    return text.isprintable() and text[0] != '"' and not NAME_OR_CALL.fullmatch(text)


def _override_named(context: Context, kind: str, keys: list[str], statement: Attribute) -> None:
    """An override of the model, cluster or precision that the run names."""
    named = next((each for each in context.run.body if isinstance(each, Attribute) and each.key.text == kind), None)
    target = named.phrase.items[0] if named else None
    if not isinstance(target, Word) or (kind, target.text) not in context.definitions.blocks:
        message = f"the run names no {kind} whose `{keys[0]}` could be set"
        context.complain("E0504", message, statement.key.span, f"define a {kind} and write `{kind} = name`")
        return
    try:
        block = context.block(kind, target.text, target.span)
    except RejectedError:
        return
    context.extended[kind, target.text] = _put(context, block, keys, statement)


def _put(context: Context, block: Block, keys: list[str], statement: Attribute) -> Block:
    """A block with one value set; the keys are those of the blocks it is nested in."""
    words = [Word(key, statement.key.span) for key in keys]
    inner: Attribute | Block = Attribute(words[-1], statement.phrase, statement.span)
    for word in reversed(words[:-1]):
        inner = Block(word, (), None, (inner,), statement.key.span)
    return merge(block, Block(block.key, (), None, (inner,), block.head), context.mistakes)

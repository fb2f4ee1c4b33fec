"""What the resolver carries along: definitions, mistakes so far, where each value was written, what failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dsl.closed_forms.ramp import Size
from dsl.facts.units import Quantity
from dsl.messages.diagnostics import Diagnostic, Note, Span, listed
from dsl.resolve.files import Definitions
from dsl.resolve.merge import merge
from dsl.schema import BUILT_IN, Node, PhaseWithin, Tile
from dsl.text.parser import MAX_DEPTH
from dsl.text.syntax import Attribute, Block, Let, Number, Phrase, Word


class RejectedError(Exception):
    """A value that cannot be used; why is already among the mistakes."""


@dataclass(frozen=True)
class Scope:
    """Where an expression stands: the blocks around it, outermost first, and their path in the spec."""

    blocks: tuple[Block, ...]
    path: str = ""

    def inside(self, block: Block, name: str) -> Scope:
        return Scope((*self.blocks, block), self.at(name))

    def at(self, name: str) -> str:
        """The path of a key of this block: `parallel.pipeline`."""
        return f"{self.path}.{name}" if self.path else name


class FieldReader(Protocol):
    """Reads one field of a block: `dsl.resolve.blocks.field`."""

    def __call__(
        self, context: Context, scope: Scope, cls: type[Node], name: str, statement: Attribute | Block, /
    ) -> Any: ...


@dataclass
class Context:
    """One resolution of one run."""

    definitions: Definitions
    run: Block
    read_field: FieldReader  # for what is derived from fields, which may be derived themselves
    mistakes: list[Diagnostic] = field(default_factory=list)
    complained: set[tuple[str, str, str, int, int]] = field(default_factory=set)  # what mistakes has, and where
    origins: dict[str, Span] = field(default_factory=dict)  # path → where its value is written
    failed: set[str] = field(default_factory=set)  # paths without a usable value
    depth: int = 0  # of the expression being evaluated, through references
    active: list[Span] = field(default_factory=list)  # definitions being evaluated, to find cycles
    circular: set[Span] = field(default_factory=set)  # definitions whose circle has been reported
    phrases: dict[tuple[Span, str], Quantity | None] = field(default_factory=dict)  # evaluated; None: rejected
    extended: dict[tuple[str, str], Block] = field(default_factory=dict)
    uses: dict[Span, Attribute | Let] = field(default_factory=dict)  # a reference → what it names, for editors
    respelled: dict[Span, str] = field(default_factory=dict)  # the misspelt key of a block → what was meant
    lets: list[tuple[Scope, Let]] = field(default_factory=list)  # of the blocks that were looked at
    chosen: Mapping[str, Any] = field(default_factory=dict)  # path → value, of keys that are written `auto`
    opened: dict[str, Span] = field(default_factory=dict)  # the others of these, each with its `auto`
    within: PhaseWithin | None = None  # where this phase is in its run
    before: tuple[Size, ...] = ()  # sizes of the batch in the phases before this one
    rate_begin: int = 0  # the token at which the phase begins that says the rate

    def complain(self, code: str, message: str, span: Span, hint: str = "", notes: Iterable[Note] = ()) -> None:
        place = (code, message, span.source.name, span.start, span.end)
        if place not in self.complained:  # a block that others are put over is read several times
            self.complained.add(place)
            self.mistakes.append(Diagnostic(code, message, span, hint, tuple(notes)))

    def reject(self, code: str, message: str, span: Span, hint: str = "", notes: Iterable[Note] = ()) -> RejectedError:
        """Report a mistake; to be raised."""
        self.complain(code, message, span, hint, notes)
        return RejectedError()

    def silent(self) -> Context:
        """A context that reports to nobody, to look at a value that will be, or was, looked at aloud."""
        return replace(
            self,
            mistakes=[],
            complained=set(),
            origins={},
            failed=set(),
            active=[],
            phrases={},
            circular=set(),
            extended=dict(self.extended),
            respelled={},
            lets=[],
        )

    def block(self, kind: str, name: str, used: Span) -> Block:
        """A named block with what it inherits."""
        key = (kind, name)
        if key not in self.extended:
            self.extended[key] = self._extend(kind, name, used, ())
        return self.extended[key]

    def _extend(self, kind: str, name: str, used: Span, chain: tuple[str, ...]) -> Block:
        block = self.definitions.blocks.get((kind, name))
        if block is None and kind == "precision" and name in BUILT_IN and chain:
            return _built_in(name, used)
        if block is None:
            names = [other for of_kind, other in self.definitions.blocks if of_kind == kind and other not in chain]
            names += BUILT_IN if kind == "precision" else ()
            if self.definitions.damaged:
                raise RejectedError  # it may be in what could not be read
            raise self.reject("E0401", f"there is no {kind} `{name}`", used, suggest(name, names, kind))
        if block.parent is None:
            return block
        if len(chain) >= MAX_DEPTH and name not in chain:
            message = f"this {kind} extends more than {MAX_DEPTH} others, one after the other"
            raise self.reject("E0103", message, block.head, "extend a block nearer to the first")
        if name in chain:
            circle = " extends ".join(f"`{each}`" for each in (*chain[chain.index(name) :], name))
            raise self.reject("E0402", f"a {kind} inherits from itself: {circle}", block.head, "remove one `extends`")
        parent = self._extend(kind, block.parent.text, block.parent.span, (*chain, name))
        return merge(parent, block, self.mistakes)


def _built_in(name: str, used: Span) -> Block:
    """A precision of the language as a block: what extends it is where its values are written."""
    return Block(Word("precision", used), (Word(name, used),), None, _body(BUILT_IN[name], used), used)


def _body(node: Node, used: Span) -> tuple[Attribute | Block, ...]:
    """The statements that say a node."""
    return tuple(_statement(Word(key, used), value) for key, value in node if value is not None and key != "name")


def _statement(key: Word, value: str | bool | int | Tile | Node) -> Attribute | Block:
    """A key with its dtype, number, tile or block, as it would be written."""
    used = key.span
    if isinstance(value, Node) and not isinstance(value, Tile):
        return Block(key, (), None, _body(value, used), used)
    if isinstance(value, (str, bool)):
        said: Word | Number = Word(str(value).lower(), used)
    else:
        said = Number(str(value), used)
    return Attribute(key, Phrase((said,), used), used)


def suggest(word: str, words: Iterable[str], kind: str = "") -> str:
    """A hint for a word that is none of the known ones: what was meant, where that is clear, else what there is."""
    from dsl.facts.vocabulary import SAME
    from dsl.messages.spelling import nearest  # only where something is wrong

    names = sorted(set(words))
    same = SAME.get(word.lower().replace("-", "_"))
    if same in names:
        return f"did you mean `{same}`?"
    meant = nearest(word, names)
    if meant:
        return f"did you mean {listed(meant, 'or')}?"
    if len(names) == 1:
        return f"write `{names[0]}`"
    if not names:
        return f"define or import a {kind}" if kind else ""
    return f"one of {listed(names)}"


def inside_out(scope: Scope) -> Iterator[tuple[Block, Scope]]:
    """The blocks around an expression, innermost first, each with the scope of its own keys."""
    parts = scope.path.split(".") if scope.path else []
    for index in range(len(scope.blocks) - 1, -1, -1):
        depth = len(parts) - (len(scope.blocks) - 1 - index)
        yield scope.blocks[index], Scope(scope.blocks[: index + 1], ".".join(parts[: max(0, depth)]))

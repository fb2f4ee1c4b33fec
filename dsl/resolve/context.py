"""State of the resolver: definitions, mistakes so far, the position of each value, and the paths that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dsl.closed_forms.ramp import Size
from dsl.facts.units import Quantity
from dsl.messages.diagnostics import Diagnostic, Note, Span, join_as_code
from dsl.resolve.files import Definitions
from dsl.resolve.merge import merge
from dsl.schema import BUILT_IN, Node, PhaseWithin, Tile
from dsl.text.parser import MAX_DEPTH
from dsl.text.syntax import Attribute, Block, Let, Number, Phrase, Word


class RejectedError(Exception):
    """A value cannot be used. The reason has been reported already."""


@dataclass(frozen=True)
class Scope:
    """The position of an expression: the blocks around it, outermost first, and their path in the spec."""

    blocks: tuple[Block, ...]
    path: str = ""

    def inner_scope(self, block: Block, name: str) -> Scope:
        return Scope((*self.blocks, block), self.path_of(name))

    def path_of(self, name: str) -> str:
        """The path of a key of this block: `parallel.pipeline`."""
        return f"{self.path}.{name}" if self.path else name


class FieldReader(Protocol):
    """Reads one field of a block: `dsl.resolve.blocks.field`."""

    def __call__(
        self, context: Context, scope: Scope, cls: type[Node], name: str, statement: Attribute | Block, /
    ) -> Any: ...


@dataclass
class Context:
    """State of resolving one run."""

    definitions: Definitions
    run: Block
    read_field: FieldReader  # for values derived from fields, which may be derived themselves
    mistakes: list[Diagnostic] = field(default_factory=list)
    complained: set[tuple[str, str, str, int, int]] = field(default_factory=set)  # identity of each reported mistake
    origins: dict[str, Span] = field(default_factory=dict)  # path → position of its value
    failed: set[str] = field(default_factory=set)  # paths without a valid value
    depth: int = 0  # of the expression being evaluated, including references
    active: list[Span] = field(default_factory=list)  # definitions being evaluated, to detect cycles
    circular: set[Span] = field(default_factory=set)  # definitions whose cycle has been reported
    phrases: dict[tuple[Span, str], Quantity | None] = field(default_factory=dict)  # evaluated phrases; None: rejected
    extended: dict[tuple[str, str], Block] = field(default_factory=dict)
    uses: dict[Span, Attribute | Let] = field(default_factory=dict)  # a reference → its definition, for editors
    key_corrections: dict[Span, str] = field(
        default_factory=dict
    )  # the misspelt key of a block → the key that was meant
    lets: list[tuple[Scope, Let]] = field(default_factory=list)  # lets in the blocks that were resolved
    chosen: Mapping[str, Any] = field(default_factory=dict)  # path → chosen value of a key that is `auto`
    opened: dict[str, Span] = field(default_factory=dict)  # path → position of an `auto` without a chosen value
    within: PhaseWithin | None = None  # position of this phase in its run
    earlier_sizes: tuple[Size, ...] = ()  # batch sizes of the earlier phases
    rate_begin: int = 0  # first token of the phase that gives the rate

    def complain(self, code: str, message: str, span: Span, hint: str = "", notes: Iterable[Note] = ()) -> None:
        place = (code, message, span.source.name, span.start, span.end)
        if place not in self.complained:  # a block that others are merged over is read several times
            self.complained.add(place)
            self.mistakes.append(Diagnostic(code, message, span, hint, tuple(notes)))

    def reject(self, code: str, message: str, span: Span, hint: str = "", notes: Iterable[Note] = ()) -> RejectedError:
        """Report a mistake and return the exception to raise."""
        self.complain(code, message, span, hint, notes)
        return RejectedError()

    def silent_copy(self) -> Context:
        """A copy of the context whose mistakes are dropped, to peek at a value that is reported on elsewhere."""
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
            key_corrections={},
            lets=[],
        )

    def block(self, kind: str, name: str, span: Span) -> Block:
        """Return a named block, merged with those that it extends."""
        key = (kind, name)
        if key not in self.extended:
            self.extended[key] = self._extend(kind, name, span, ())
        return self.extended[key]

    def _extend(self, kind: str, name: str, span: Span, chain: tuple[str, ...]) -> Block:
        block = self.definitions.blocks.get((kind, name))
        if block is None and kind == "precision" and name in BUILT_IN and chain:
            return _built_in(name, span)
        if block is None:
            names = [
                block_name
                for of_kind, block_name in self.definitions.blocks
                if of_kind == kind and block_name not in chain
            ]
            names += BUILT_IN if kind == "precision" else ()
            if self.definitions.damaged:
                raise RejectedError  # it may be in the part that could not be read
            raise self.reject("E0401", f"there is no {kind} `{name}`", span, suggest(name, names, kind))
        if block.parent is None:
            return block
        if len(chain) >= MAX_DEPTH and name not in chain:
            message = f"this {kind} extends a chain of more than {MAX_DEPTH} others"
            raise self.reject("E0103", message, block.head, "extend a block nearer to the first")
        if name in chain:
            cycle = " extends ".join(f"`{link}`" for link in (*chain[chain.index(name) :], name))
            raise self.reject("E0402", f"a {kind} inherits from itself: {cycle}", block.head, "remove one `extends`")
        parent = self._extend(kind, block.parent.text, block.parent.span, (*chain, name))
        return merge(parent, block, self.mistakes)


def _built_in(name: str, span: Span) -> Block:
    """A built-in precision as a block. Its values have the position of the block that extends it."""
    return Block(Word("precision", span), (Word(name, span),), None, _body(BUILT_IN[name], span), span)


def _body(node: Node, span: Span) -> tuple[Attribute | Block, ...]:
    """The statements that define a node."""
    return tuple(_statement(Word(key, span), value) for key, value in node if value is not None and key != "name")


def _statement(key: Word, value: str | bool | int | Tile | Node) -> Attribute | Block:
    """The statement that sets a key to a dtype, number, tile or block."""
    span = key.span
    if isinstance(value, Node) and not isinstance(value, Tile):
        return Block(key, (), None, _body(value, span), span)
    if isinstance(value, (str, bool)):
        item: Word | Number = Word(str(value).lower(), span)
    else:
        item = Number(str(value), span)
    return Attribute(key, Phrase((item,), span), span)


def suggest(word: str, words: Iterable[str], kind: str = "") -> str:
    """Hint for an unknown word: the word that was probably meant, or a list of the known ones."""
    from dsl.facts.vocabulary import SYNONYMS
    from dsl.messages.spelling import nearest_words  # imported only to explain a mistake

    names = sorted(set(words))
    synonym = SYNONYMS.get(word.lower().replace("-", "_"))
    if synonym in names:
        return f"did you mean `{synonym}`?"
    close_words = nearest_words(word, names)
    if close_words:
        return f"did you mean {join_as_code(close_words, 'or')}?"
    if len(names) == 1:
        return f"write `{names[0]}`"
    if not names:
        return f"define or import a {kind}" if kind else ""
    return f"one of {join_as_code(names)}"


def enclosing_blocks(scope: Scope) -> Iterator[tuple[Block, Scope]]:
    """Yield the blocks around an expression, innermost first, each with the scope of its own keys."""
    parts = scope.path.split(".") if scope.path else []
    for index in range(len(scope.blocks) - 1, -1, -1):
        depth = len(parts) - (len(scope.blocks) - 1 - index)
        yield scope.blocks[index], Scope(scope.blocks[: index + 1], ".".join(parts[: max(0, depth)]))

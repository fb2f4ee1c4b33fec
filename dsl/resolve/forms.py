"""Fields with a syntax of their own: phases, the batch, the learning rate, the tokenizer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from itertools import takewhile
from typing import Literal

from dsl.closed_forms.ramp import Ramp
from dsl.facts.units import PLAIN, Quantity, dimension_words
from dsl.messages.diagnostics import Span, join_as_code
from dsl.resolve.context import Context, RejectedError, Scope, suggest
from dsl.resolve.evaluate import STEP, TOKEN, convert, is_value, phrase, read_leading_quantity, whole_number
from dsl.resolve.merge import key_of
from dsl.resolve.values import string
from dsl.schema import Batch, Phase, RatePhase, StoredUnit, TrainTokenizer
from dsl.schema.base import MAX_TOKENS
from dsl.text.syntax import (
    Attribute,
    BinaryOperation,
    Block,
    FunctionCall,
    Line,
    LostStatement,
    Negation,
    Phrase,
    Value,
    Word,
)

Shape = Literal["linear", "constant", "cosine"]
SHAPES: dict[str, Shape] = {"warmup": "linear", "linear": "linear", "constant": "constant", "cosine": "cosine"}
CLAUSES = ("from", "to", "at", "until", "over")
MAX_RATE = Fraction(10)


def tokens_of(context: Context, quantity: Quantity, span: Span, ramp: Ramp | None, since: int = 0) -> int:
    """Return the tokens of a duration that begins at token `since`. Steps are converted by the batch ramp."""
    if quantity.dimension == TOKEN:
        return whole_number(context, quantity.value, span, "tokens")
    if quantity.dimension == STEP:
        steps = whole_number(context, quantity.value, span, "steps")
        if steps < 0:
            raise context.reject("E0303", f"`{span.text}` is a negative number of steps", span, "write `1000 steps`")
        if ramp is None:  # mistakes in its values have been reported
            raise RejectedError
        return ramp.tokens_at(ramp.steps_for(since) + steps) - since if since else ramp.tokens_at(steps)
    is_plain = quantity.dimension == PLAIN
    unit = "a plain number" if is_plain else f"in {dimension_words(quantity.dimension)}"
    hint = f"write `{span.text} tokens` or `{span.text} steps`" if is_plain else "write tokens or steps"
    raise context.reject("E0301", f"`{span.text}` is {unit}, not a number of tokens or steps", span, hint)


def phases(context: Context, scope: Scope, statement: Attribute, ramp: Ramp | None) -> tuple[Phase, ...]:
    """Resolve `0.001 until 14.3T tokens then 0`."""
    key, items = statement.key.text, _split_negative_numbers(statement.phrase.items, ("until", "then"))
    resolved: list[Phase] = []
    while True:
        value = _phase_value(context, scope, items[0], key)
        trailing = items[1:]
        if not trailing:
            return (*resolved, Phase.model_construct(value=float(value), until_tokens=None))
        end, trailing = _phase_end(context, scope, key, trailing, statement.phrase, ramp)
        if not 1 <= end <= MAX_TOKENS:
            message = f"a phase of `{key}` ends at token {end:,}: at least 1 and at most {MAX_TOKENS:,}"
            raise context.reject("E0303", message, statement.phrase.span, "write `0.3 until 10T tokens then 0.1`")
        if resolved and end <= (resolved[-1].until_tokens or 0):
            message = f"a phase of `{key}` ends at token {end:,}, not after the phase before it"
            raise context.reject("E0703", message, statement.phrase.span, "order the phases by their ends")
        resolved.append(Phase.model_construct(value=float(value), until_tokens=end))
        items = trailing


def _phase_end(
    context: Context, scope: Scope, key: str, items: tuple[Value, ...], whole_phrase: Phrase, ramp: Ramp | None
) -> tuple[int, tuple[Value, ...]]:
    """Return the end of a phase and the items after its `then`."""
    hint = f"write `{key} = 0.3 until 10T tokens then 0.1`"
    if not _is_word(items[0], "until") or len(items) < 2:
        raise context.reject("E0703", f"`{items[0].span.text}` where `until` was expected", items[0].span, hint)
    quantity, after = read_leading_quantity(context, scope, items[1:])
    span = items[1].span.extend_to(items[-len(after) - 1].span)
    if not after:
        message = f"the last phase of `{key}` has an end"
        raise context.reject("E0703", message, whole_phrase.span, "add the value that follows: `… then 0`")
    if not _is_word(after[0], "then") or len(after) < 2:
        raise context.reject("E0703", f"`{after[0].span.text}` where `then` was expected", after[0].span, hint)
    return tokens_of(context, quantity, span, ramp), after[1:]


def batch(context: Context, scope: Scope, statement: Attribute | Block, ramp: None = None) -> Batch:
    """Resolve `batch = 64` or `batch { from = 3072, to = 15360, over = 469B tokens }`."""
    if isinstance(statement, Attribute):
        value = convert(context, phrase(context, scope, statement.phrase), None, "batch", statement.phrase.span)
        size = _size(context, value, statement.phrase.span)
        return Batch.model_construct(start=size, end=size)
    inner = scope.inner_scope(statement, "batch")
    settings: dict[str, tuple[Fraction, Span]] = {}
    rejected = False
    for entry in statement.body:
        key = key_of(entry)
        if key not in ("from", "to", "over") or not isinstance(entry, Attribute):
            span = entry.key.span if isinstance(entry, (Attribute, Block)) else entry.span
            if not isinstance(entry, LostStatement):
                free = {"from", "to", "over"} - {key_of(sibling) for sibling in statement.body}
                context.complain(
                    "E0201",
                    f"`batch` has no key `{key or span.text}`",
                    span,
                    suggest(key, free) if free else "remove it",
                )
            rejected = True
            continue
        context.origins[inner.path_of(key)] = entry.phrase.span
        unit = StoredUnit("token", bare=True) if key == "over" else None
        try:
            quantity = phrase(context, inner, entry.phrase)
            settings[key] = (convert(context, quantity, unit, key, entry.phrase.span), entry.phrase.span)
        except RejectedError:
            rejected = True
    if rejected:
        raise RejectedError
    for key, example in (("from", "from = 3072"), ("to", "to = 15360"), ("over", "over = 469B tokens")):
        if key not in settings:
            raise context.reject("E0203", f"`batch` has no `{key}`", statement.head, f"add `{example}`")
    start, end = (_size(context, *settings[key]) for key in ("from", "to"))
    over_tokens = whole_number(context, *settings["over"], "tokens")
    if not 0 < over_tokens <= MAX_TOKENS:
        raise context.reject(
            "E0303", f"`over = {over_tokens}` is out of bounds: at least 1", settings["over"][1], "write more tokens"
        )
    return Batch.model_construct(start=start, end=end, over_tokens=over_tokens)


def _size(context: Context, value: Fraction, span: Span) -> int:
    size = whole_number(context, value, span, "sequences")
    if not 1 <= size <= 100_000_000:
        message = f"`{span.text}` is out of bounds: at least 1 and at most 100,000,000"
        raise context.reject("E0303", message, span, "write the number of sequences per step")
    return size


def tokenizer(context: Context, scope: Scope, statement: Attribute) -> str | TrainTokenizer:
    """Resolve `"tokenizer.json"` or `train(4096)`."""
    value = statement.phrase.items[0]
    if len(statement.phrase.items) > 1:
        raise context.reject("E0302", "`tokenizer` takes one value", statement.phrase.items[1].span, "remove the rest")
    if not isinstance(value, FunctionCall):
        return string(context, "tokenizer", value, is_path=True)
    if value.name != "train" or len(value.arguments) != 1:
        message = f"`{value.span.text}` is not a tokenizer"
        raise context.reject("E0302", message, value.span, 'write `train(4096)`, or a file as in `"tokenizer.json"`')
    argument = value.arguments[0]
    vocab = convert(context, read_leading_quantity(context, scope, (argument,)).quantity, None, "train", argument.span)
    size = whole_number(context, vocab, argument.span, "entries")
    if not 257 <= size <= 16_777_216:
        message = f"a vocabulary of {size:,} is out of bounds: at least 257 and at most 16,777,216"
        raise context.reject("E0303", message, argument.span, "write `train(4096)`")
    return TrainTokenizer.model_construct(vocab=size)


# ---------------------------------------------------------------- the learning rate


@dataclass(frozen=True)
class Clause:
    """A clause of a rate line: `to 2.2e-4`, `over 4.3T tokens`."""

    value: Quantity
    span: Span


def rate(context: Context, scope: Scope, block: Block, ramp: Ramp | None, total: int | None) -> tuple[RatePhase, ...]:
    """Resolve the lines of a `rate` block. `total`: tokens of the run, the end of a last phase that gives none.

    A rate in a phase of the run begins with this phase; a constant fills the tokens before it.
    """
    resolved: list[RatePhase] = []
    lines = [item for item in block.body if isinstance(item, Line)]
    damaged = len(lines) < len(block.body)
    # A damaged line may change the rate, so the lines after it are not checked against it.
    leading = [*takewhile(lambda item: isinstance(item, Line), block.body)]
    for item in block.body:
        if not isinstance(item, (Line, LostStatement)):
            hint = "write `warmup 2000 steps to 2.2e-4`"
            context.complain(
                "E0704", "a phase of the rate is a line such as `warmup 2000 steps to 2.2e-4`", item.span, hint
            )
    if not block.body:
        raise context.reject("E0704", "`rate` has no phase", block.head, "write `constant at 1e-4`")
    for index, line in enumerate(lines[: len(leading)]):
        is_last = index == len(lines) - 1
        try:
            previous = resolved[-1] if resolved else None
            resolved.append(_phase_of_line(context, scope, line, previous, ramp, total if is_last else None, is_last))
            context.origins[f"{scope.path_of('rate')}.{index + (context.rate_begin > 0)}"] = line.span
        except RejectedError:
            damaged = True
            break  # later phases begin where this one would have ended
    for line in lines[len(resolved) + (len(resolved) < len(leading)) :] if damaged else ():
        _check_alone(context, scope, line)
    if damaged:
        raise RejectedError
    if context.rate_begin:
        context.origins[f"{scope.path_of('rate')}.0"] = block.head
        first_rate = resolved[0].start
        earlier_phase = RatePhase.model_construct(
            shape="constant", start=first_rate, end=first_rate, end_tokens=context.rate_begin
        )
        resolved.insert(0, earlier_phase)
    return tuple(resolved)


def _check_alone(context: Context, scope: Scope, line: Line) -> None:
    """Check a line on its own, because the beginning of its phase is unknown."""
    try:
        clauses = _clauses(context, scope, line)
        _rates(context, clauses)
        for clause in (clauses[name] for name in ("until", "over") if name in clauses):
            tokens_of(context, clause.value, clause.span, None)
    except RejectedError:
        return


def _clauses(context: Context, scope: Scope, line: Line) -> dict[str, Clause]:
    """Return the clauses of a line by name; a duration directly after the shape counts as `over`."""
    if line.head.text not in SHAPES:
        hint = suggest(line.head.text, SHAPES)
        raise context.reject("E0704", f"a rate has no phase `{line.head.text}`", line.head.span, hint)
    clauses: dict[str, Clause] = {}
    items = _split_negative_numbers(line.items, CLAUSES)
    while items:
        name, clause_items, first = "over", items, items[0]
        if isinstance(first, Word) and (first.text in CLAUSES or clauses or not is_value(context, scope, first)):
            name, clause_items = first.text, items[1:]
            if name not in CLAUSES or not clause_items:
                message = f"`{name}` where one of {join_as_code(CLAUSES)} was expected"
                raise context.reject("E0704", message, first.span, _clause_hint(line, first, clause_items))
        value, after = read_leading_quantity(context, scope, clause_items)
        span = clause_items[0].span.extend_to(items[-len(after) - 1].span)
        if name in clauses:
            raise context.reject("E0704", f"`{name}` is given twice in one phase", span, "remove one of them")
        clauses[name] = Clause(value, span)
        items = after
    _check_clauses(context, line.head, clauses)
    return clauses


def _clause_hint(line: Line, word: Word, following: tuple[Value, ...]) -> str:
    """Hint for an unknown word: the clause that was probably meant, or the line without the word."""
    from dsl.messages.spelling import nearest_words  # imported only to explain a mistake

    close_clauses = nearest_words(word.text, CLAUSES)
    if close_clauses:
        return f"did you mean {join_as_code(close_clauses, 'or')}?"
    corrected = (
        f"{line.span.text[: word.span.start - line.span.start]}{following[0].span.extend_to(line.span).text}"
        if following
        else ""
    )
    return f"write `{corrected}`" if corrected else "write `cosine to 2.2e-5 over 4.3T tokens`"


def _check_clauses(context: Context, head: Word, clauses: dict[str, Clause]) -> None:
    """Check that the clauses fit the shape. Raises RejectedError after reporting one that does not."""
    constant = SHAPES[head.text] == "constant"
    allowed = {"at", "until", "over"} if constant else {"from", "to", "until", "over"}
    hint = "write `constant at 2.2e-5 over 333B tokens`" if constant else f"write `{head.text} to 2.2e-5 …`"
    for name, clause in clauses.items():
        if name not in allowed:
            raise context.reject("E0704", f"`{head.text}` has no `{name}`", clause.span, hint)
    if "until" in clauses and "over" in clauses:
        raise context.reject("E0704", "a phase ends once: `until` or `over`", clauses["over"].span, "keep one of them")
    if not constant and "to" not in clauses:
        raise context.reject("E0704", f"`{head.text}` has no `to`", head.span, hint)


def _phase_of_line(
    context: Context,
    scope: Scope,
    line: Line,
    previous: RatePhase | None,
    ramp: Ramp | None,
    total: int | None,
    is_last: bool,
) -> RatePhase:
    clauses = _clauses(context, scope, line)
    shape, head = SHAPES[line.head.text], line.head
    start, end = _start_and_end(context, shape, head, clauses, previous)
    begin = previous.end_tokens if previous else context.rate_begin
    end_tokens = _end_token(context, line, clauses, begin, ramp, total, is_last)
    return RatePhase.model_construct(shape=shape, start=start, end=end, end_tokens=end_tokens)


def _start_and_end(
    context: Context, shape: Shape, head: Word, clauses: dict[str, Clause], previous: RatePhase | None
) -> tuple[float, float]:
    """Return the rates at the start and the end of a phase."""
    values = _rates(context, clauses)
    current = previous.end if previous else None
    if shape == "constant":
        value = values.get("at", current)
        if value is None:
            raise context.reject("E0704", "the first phase has no rate", head.span, "write `constant at 1e-4`")
        return value, value
    start = values.get("from", 0.0 if head.text == "warmup" else current)
    if start is None:
        hint = f"write `{head.text} from 0 to …`, or `warmup`"
        raise context.reject("E0704", "the first phase has no `from`", head.span, hint)
    return start, values["to"]


def _rates(context: Context, clauses: dict[str, Clause]) -> dict[str, float]:
    """Return the rates of a line by clause. All are evaluated first, to report the mistakes in each."""
    rates: dict[str, float] = {}
    names = [name for name in ("at", "from", "to") if name in clauses]
    for name in names:
        try:
            rates[name] = _rate_value(context, name, clauses[name])
        except RejectedError:
            continue
    if len(rates) < len(names):
        raise RejectedError
    return rates


def _rate_value(context: Context, name: str, clause: Clause) -> float:
    value = convert(context, clause.value, None, name, clause.span)
    if not 0 <= value <= MAX_RATE:
        message = f"a rate of `{clause.span.text}` is out of bounds: at least 0 and at most {MAX_RATE}"
        raise context.reject("E0303", message, clause.span, "write the learning rate, as in `2.2e-4`")
    return float(value)


def _end_token(
    context: Context,
    line: Line,
    clauses: dict[str, Clause],
    begin: int,
    ramp: Ramp | None,
    total: int | None,
    is_last: bool,
) -> int:
    """Return the token at which a phase ends."""
    if "until" in clauses:
        end = tokens_of(context, clauses["until"].value, clauses["until"].span, ramp)
    elif "over" in clauses:
        end = begin + tokens_of(context, clauses["over"].value, clauses["over"].span, ramp, begin)
    elif is_last:
        if total is None:
            raise RejectedError
        end = max(total, begin + 1)
    else:
        hint = "add `until 10T tokens` or `over 2000 steps`"
        raise context.reject("E0704", "only the last phase may have no end", line.head.span, hint)
    if end <= begin:
        message = f"this phase ends at token {end:,}, but begins at token {begin:,}"
        raise context.reject("E0705", message, line.span, "give it more tokens, or remove it")
    if end > MAX_TOKENS:
        raise context.reject(
            "E0303",
            f"this phase ends after token {MAX_TOKENS:,}, the largest possible",
            line.span,
            "write fewer tokens",
        )
    return end


def _phase_value(context: Context, scope: Scope, value: Value, key: str) -> Fraction:
    fraction = convert(context, read_leading_quantity(context, scope, (value,)).quantity, None, key, value.span)
    if not 0 <= fraction <= 1000:
        message = f"`{value.span.text}` is out of bounds for `{key}`: at least 0 and at most 1000"
        raise context.reject("E0303", message, value.span, "write a number from 0 to 1000")
    return fraction


def _split_negative_numbers(items: tuple[Value, ...], words: Collection[str]) -> tuple[Value, ...]:
    """Return the items with `to -1` as a word and a negative number; the parser reads it as a difference."""
    values: list[Value] = []
    for item in items:
        parts = _word_and_negative(item, words)
        values += parts if parts else (item,)
    return tuple(values)


def _word_and_negative(item: Value, words: Collection[str]) -> tuple[Value, Value] | None:
    if not isinstance(item, BinaryOperation):
        return None
    if isinstance(item.left, Word) and item.left.text in words and item.operator == "-":
        source = item.span.source
        sign = Span(source, source.text.index("-", item.left.span.end), item.right.span.end)
        return item.left, Negation(item.right, sign)
    inner = _word_and_negative(item.left, words)
    return inner and (
        inner[0],
        BinaryOperation(item.operator, inner[1], item.right, inner[1].span.extend_to(item.right.span)),
    )


def _is_word(value: Value, word: str) -> bool:
    return isinstance(value, Word) and value.text == word

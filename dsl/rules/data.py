"""Rules on the training data."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.facts.shares import MAX_PERIOD, integer_weights
from dsl.rules.finding import Finding
from dsl.schema import Compressed, CustomAttention, Filters, Spec

STDLIB = "python_stdlib"
TOKEN_SUFFIXES = (".idx", ".bin")


def conversations_can_be_read(spec: Spec) -> Iterator[Finding]:
    """Conversations are lines of files in one source, with the tokenizer of the tuned model and without `documents`."""
    data = spec.data
    if data.chat is None:
        return
    note = (("the conversations", "data.chat"),)
    if not isinstance(data.tokenizer, str):
        message = "conversations need the tokenizer of the model that is tuned, not one that is trained on the data"
        hint = 'write `tokenizer = "tokenizer.json"`, the file of that model'
        yield Finding("E0931", message, "data.tokenizer", hint, note)
    if data.source == STDLIB:
        message = f"{STDLIB} holds no conversations"
        yield Finding("E0931", message, "data.source", 'write `source = "chat/*.jsonl"`', note)
    if data.sources:
        message = "conversations come from one `source`, as their rows share sequences"
        yield Finding("E0931", message, "data.sources", 'write `source = "chat/*.jsonl"`', note)
    if data.documents == "masked":
        message = "`documents` is for text: a conversation never attends to another"
        hint = "remove `documents`; `pack = true` in `chat` puts several conversations into a sequence"
        yield Finding("E0931", message, "data.documents", hint, note)


def prompts_are_rows(spec: Spec) -> Iterator[Finding]:
    """Prompts are rows of files in one source, with the tokenizer of the model and without keys for documents or
    conversations."""
    data = spec.data
    if data.prompts is None:
        return
    note = (("the prompts", "data.prompts"),)
    if data.chat is not None:  # other messages would repeat those about conversations
        yield Finding("E0961", "rows are prompts or conversations, not both", "data.chat", "remove `chat`", note)
        return
    problems: list[tuple[str, str, str]] = []
    if not isinstance(data.tokenizer, str):
        message = "prompts need the tokenizer of the model that completes them, not one that is trained on the data"
        problems.append(("data.tokenizer", message, 'write `tokenizer = "tokenizer.json"`, the file of that model'))
    if data.source == STDLIB:
        problems.append(("data.source", f"{STDLIB} holds no prompts", 'write `source = "prompts.jsonl"`'))
    if data.sources:
        problems.append(("data.sources", "prompts come from one `source`", 'write `source = "prompts.jsonl"`'))
    if data.documents == "masked":
        problems.append(
            ("data.documents", "`documents` is for text: a prompt never attends to another", "remove `documents`")
        )
    if data.column != "text":
        message = "`column` is for documents; `prompts` names the key of a prompt"
        problems.append(
            ("data.column", message, f'remove `column`, and write `prompts {{ prompt = "{data.column}" }}`')
        )
    if data.fim:
        problems.append(("data.fim", "fill-in-the-middle needs documents, but the rows are prompts", "remove `fim`"))
    if data.filters not in (None, Filters()):
        problems.append(("data.filters", "filters need documents, but the rows are prompts", "remove `filters`"))
    for path, message, hint in problems:
        yield Finding("E0961", message, path, hint, note)


def fim_has_documents_and_tokens(spec: Spec) -> Iterator[Finding]:
    """Fill-in-the-middle needs documents, and three special tokens of a tokenizer."""
    data = spec.data
    rates = {f"data.sources.{source.name}.fim": source.fim for source in data.sources if source.fim is not None}
    path = next((path for path, rate in {"data.fim": data.fim, **rates}.items() if rate), None)
    if path is None:
        return
    if data.chat is not None:
        message = "fill-in-the-middle needs documents, but the rows are conversations"
        yield Finding("E0933", message, path, "remove `fim`", (("the conversations", "data.chat"),))
    if data.tokenizer is None:
        message = (
            "fill-in-the-middle puts special tokens between the parts of a document, and there is no tokenizer that "
            "has them"
        )
        note = (("there is no tokenizer here", "data.end_id"),)
        yield Finding("E0933", message, path, 'write `tokenizer = "tokenizer.json"` instead of `end_id`', note)


def filters_have_documents(spec: Spec) -> Iterator[Finding]:
    """Filters need the text of documents."""
    data = spec.data
    for path, filters, sources in _filter_blocks(spec):
        ids = [named for named, files in sources.items() if files.endswith(TOKEN_SUFFIXES)]
        message = "filters read the text of documents, but these files have token ids"
        if filters == Filters():  # none
            continue
        if data.chat is not None:
            message, note = "filters need documents, but the rows are conversations", ("the conversations", "data.chat")
            yield Finding("E0934", message, path, "remove `filters`", (note,))
        elif data.tokenizer is None:
            yield Finding("E0934", message, path, "remove `filters`", (("the token ids", "data.end_id"),))
        elif data.sources:
            for named in ids:
                yield Finding("E0934", message, named, "write `filters { }` in this source", (("the filters", path),))
        elif ids:
            yield Finding("E0934", message, path, "remove `filters`", (("the token ids", ids[0]),))


def lengths_leave_documents(spec: Spec) -> Iterator[Finding]:
    """At least one length passes the filters."""
    for path, filters, _ in _filter_blocks(spec):
        if filters.shortest is not None and filters.longest is not None and filters.shortest > filters.longest:
            message = f"no document has at least {filters.shortest:,} and at most {filters.longest:,} characters"
            note = (("the shortest that is kept", f"{path}.shortest"),)
            yield Finding("E0934", message, f"{path}.longest", f"write `longest = {filters.shortest}`, or more", note)


def _filter_blocks(spec: Spec) -> Iterator[tuple[str, Filters, dict[str, str]]]:
    """Each block of filters: (path, filters, files it applies to by the path of the key that names them)."""
    data = spec.data
    for source in data.sources:
        if source.filters is not None:
            path = f"data.sources.{source.name}"
            yield f"{path}.filters", source.filters, {f"{path}.files": source.files}
    if data.filters is not None:
        files = {f"data.sources.{source.name}.files": source.files for source in data.sources if source.filters is None}
        yield "data.filters", data.filters, files if data.source is None else {"data.source": data.source}


def end_is_a_token(spec: Spec) -> Iterator[Finding]:
    """`end_id` is given only without a tokenizer, and is a token of the model."""
    end, vocab = spec.data.end_id, spec.model.vocab
    if end is None:
        return
    if spec.data.tokenizer is not None:
        note = (("the tokenizer", "data.tokenizer"),)
        yield Finding(
            "E0933",
            "the tokenizer already defines the token that ends a document",
            "data.end_id",
            "remove `end_id`",
            note,
        )
    elif end >= vocab:
        note = (("the model's vocabulary", "model.vocab"),)
        message = f"token {end:,} ends a document, but the model's tokens are 0 to {vocab - 1:,}"
        yield Finding("E0906", message, "data.end_id", f"write `end_id = {vocab - 1}`, or more `vocab`", note)


def documents_reach_attention(spec: Spec) -> Iterator[Finding]:
    """Masking documents needs attention that gets their starts. A custom module gets only the residual stream, and
    compressed entries cover a fixed number of tokens across documents."""
    data = spec.data
    if not data.masks_documents:
        return
    packed = data.documents != "masked"
    key, hint = ("data.chat.pack", "pack = false") if packed else ("data.documents", "documents = joined")
    reasons = {
        CustomAttention: "custom attention does not get the starts of documents",
        Compressed: "compressed attention makes entries across documents",
    }
    for path, attention in spec.model.attentions:
        if reason := reasons.get(type(attention)):
            message = f"tokens attend only to their own document, but {reason}"
            note = (("this attention sees all documents of a sequence", path),)
            yield Finding("E1007", message, key, f"write `{hint}`", note)
            return


def weights_have_a_period(spec: Spec) -> Iterator[Finding]:
    """At least one source has a weight above 0, and the order of sources repeats soon enough for a table."""
    sources = spec.data.sources
    if not sources:
        return
    if not any(source.weight for source in sources):
        yield Finding("E0932", "no source has a weight above 0", "data.sources", "write `weight = 1` in one of them")
        return
    period = sum(integer_weights([source.weight for source in sources]))
    if period > MAX_PERIOD:
        longest = max(sources, key=lambda source: len(repr(source.weight)))
        message = (
            f"the whole numbers in proportion to these weights sum to {period:,}: at most {MAX_PERIOD:,} are allowed"
        )
        hint = "write weights with fewer digits, as in `weight = 0.33`, or whole numbers, as in `weight = 1`"
        yield Finding("E0932", message, f"data.sources.{longest.name}.weight", hint)


def micro_batches_differ(spec: Spec) -> Iterator[Finding]:
    """If every token attends to its whole sequence, all micro-batches cost the same, and cannot be ordered by cost."""
    if spec.schedule.order == "cost" and not spec.data.masks_documents:
        message = (
            "order = cost: tokens attend to all earlier tokens of their sequence, so all micro-batches cost the same"
        )
        key, edit = ("data.chat", "chat { pack = true }") if spec.data.chat else ("data", "documents = masked")
        yield Finding("E0814", message, "schedule.order", f"remove `order`, or write `{edit}`", (("the data", key),))

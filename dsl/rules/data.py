"""The text that a run is trained on."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.facts.shares import MAX_PERIOD, whole
from dsl.rules.finding import Finding
from dsl.schema import Compressed, CustomAttention, Filters, Spec

STDLIB = "python_stdlib"
TOKEN_SUFFIXES = (".idx", ".bin")


def conversations_can_be_read(spec: Spec) -> Iterator[Finding]:
    """Conversations are lines of files, in the tokens of a tokenizer that has those of its template, and apart."""
    data = spec.data
    if data.chat is None:
        return
    note = (("the conversations", "data.chat"),)
    if not isinstance(data.tokenizer, str):
        message = "conversations are in the tokens of the model that is tuned, not of a tokenizer that is trained"
        hint = 'write `tokenizer = "tokenizer.json"`, the file of that model'
        yield Finding("E0931", message, "data.tokenizer", hint, note)
    if data.source == STDLIB:
        message = f"{STDLIB} holds no conversations"
        yield Finding("E0931", message, "data.source", 'write `source = "chat/*.jsonl"`', note)
    if data.sources:
        message = "conversations are of one source: their rows are put into sequences together"
        yield Finding("E0931", message, "data.sources", 'write `source = "chat/*.jsonl"`', note)
    if data.documents == "masked":
        message = "`documents` is about text: a conversation never sees another"
        hint = "leave it out; `pack = true` in `chat` puts several conversations into a sequence"
        yield Finding("E0931", message, "data.documents", hint, note)


def prompts_are_rows(spec: Spec) -> Iterator[Finding]:
    """Prompts are rows of files, in the tokens of the model, and what is about documents or conversations is not about
    them."""
    data = spec.data
    if data.prompts is None:
        return
    note = (("the prompts", "data.prompts"),)
    if data.chat is not None:  # what else conversations do not go with, is said of these
        yield Finding("E0961", "rows are prompts or conversations, and not both", "data.chat", "remove `chat`", note)
        return
    found: list[tuple[str, str, str]] = []
    if not isinstance(data.tokenizer, str):
        message = "prompts are in the tokens of the model that completes them, not of a tokenizer that is trained"
        found.append(("data.tokenizer", message, 'write `tokenizer = "tokenizer.json"`, the file of that model'))
    if data.source == STDLIB:
        found.append(("data.source", f"{STDLIB} holds no prompts", 'write `source = "prompts.jsonl"`'))
    if data.sources:
        found.append(("data.sources", "prompts are of one source", 'write `source = "prompts.jsonl"`'))
    if data.documents == "masked":
        found.append(("data.documents", "`documents` is about text: a prompt never sees another", "leave it out"))
    if data.column != "text":
        message = "`column` is where a document is in its row; where a prompt is, `prompts` says"
        found.append(("data.column", message, f'remove `column`, and write `prompts {{ prompt = "{data.column}" }}`'))
    if data.fim:
        found.append(("data.fim", "fill-in-the-middle is of documents, and these are prompts", "remove `fim`"))
    if data.filters not in (None, Filters()):
        found.append(("data.filters", "filters are of documents, and these are prompts", "remove `filters`"))
    for at, message, hint in found:
        yield Finding("E0961", message, at, hint, note)


def middles_have_tokens(spec: Spec) -> Iterator[Finding]:
    """Fill-in-the-middle takes documents, and three tokens of a tokenizer."""
    data = spec.data
    rates = {f"data.sources.{each.name}.fim": each.fim for each in data.sources if each.fim is not None}
    path = next((path for path, rate in {"data.fim": data.fim, **rates}.items() if rate), None)
    if path is None:
        return
    if data.chat is not None:
        message = "fill-in-the-middle is of documents, and these are conversations"
        yield Finding("E0933", message, path, "remove `fim`", (("the conversations", "data.chat"),))
    if data.tokenizer is None:
        message = "fill-in-the-middle writes tokens between the parts of a document, and no tokenizer says which"
        note = (("there is no tokenizer here", "data.end_id"),)
        yield Finding("E0933", message, path, 'write `tokenizer = "tokenizer.json"` in the place of `end_id`', note)


def filters_have_documents(spec: Spec) -> Iterator[Finding]:
    """What is filtered is the text of documents."""
    data = spec.data
    for path, filters, sources in _filters(spec):
        ids = [named for named, files in sources.items() if files.endswith(TOKEN_SUFFIXES)]
        message = "filters read the text of documents, and these are token ids"
        if filters == Filters():  # none
            continue
        if data.chat is not None:
            message, note = "filters are of documents, and these are conversations", ("the conversations", "data.chat")
            yield Finding("E0934", message, path, "remove `filters`", (note,))
        elif data.tokenizer is None:
            yield Finding("E0934", message, path, "remove `filters`", (("the token ids", "data.end_id"),))
        elif data.sources:
            for named in ids:
                yield Finding("E0934", message, named, "write `filters { }` in this source", (("the filters", path),))
        elif ids:
            yield Finding("E0934", message, path, "remove `filters`", (("the token ids", ids[0]),))


def lengths_leave_documents(spec: Spec) -> Iterator[Finding]:
    """Some length passes the filters."""
    for path, filters, _ in _filters(spec):
        if filters.shortest is not None and filters.longest is not None and filters.shortest > filters.longest:
            message = f"no document has {filters.shortest:,} characters at least and {filters.longest:,} at most"
            note = (("the shortest that is kept", f"{path}.shortest"),)
            yield Finding("E0934", message, f"{path}.longest", f"write `longest = {filters.shortest}`, or more", note)


def _filters(spec: Spec) -> Iterator[tuple[str, Filters, dict[str, str]]]:
    """The path of each block of filters, what it says, and the files that it is of, by the path of what names them."""
    data = spec.data
    for each in data.sources:
        if each.filters is not None:
            path = f"data.sources.{each.name}"
            yield f"{path}.filters", each.filters, {f"{path}.files": each.files}
    if data.filters is not None:
        rest = {f"data.sources.{each.name}.files": each.files for each in data.sources if each.filters is None}
        yield "data.filters", data.filters, rest if data.source is None else {"data.source": data.source}


def end_is_a_token(spec: Spec) -> Iterator[Finding]:
    """What ends a document is said once, and is a token of the model."""
    end, vocab = spec.data.end_id, spec.model.vocab
    if end is None:
        return
    if spec.data.tokenizer is not None:
        note = (("the tokenizer", "data.tokenizer"),)
        yield Finding("E0933", "the tokenizer says which token ends a document", "data.end_id", "remove `end_id`", note)
    elif end >= vocab:
        note = (("the model's vocabulary", "model.vocab"),)
        message = f"the token {end:,} ends a document, and those of the model are 0 to {vocab - 1:,}"
        yield Finding("E0906", message, "data.end_id", f"write `end_id = {vocab - 1}`, or more `vocab`", note)


def documents_reach_attention(spec: Spec) -> Iterator[Finding]:
    """Attention is told where documents begin; a module of a user's own is called with the residual stream alone, and
    entries are of so many tokens of a sequence, whichever documents these are of."""
    data = spec.data
    if not data.masks_documents:
        return
    packed = data.documents != "masked"
    key, hint = ("data.chat.pack", "pack = false") if packed else ("data.documents", "documents = joined")
    why = {
        CustomAttention: "modules of attention are not told where documents begin",
        Compressed: "compressed attention makes entries of all that is in a sequence",
    }
    for path, attention in spec.model.attentions:
        if reason := why.get(type(attention)):
            message = f"a token sees its own document alone, and {reason}"
            note = (("tokens see all documents of their sequence here", path),)
            yield Finding("E1007", message, key, f"write `{hint}`", note)
            return


def weights_have_a_period(spec: Spec) -> Iterator[Finding]:
    """Some source is drawn from, and the order in which sources are drawn repeats soon enough to be looked up."""
    sources = spec.data.sources
    if not sources:
        return
    if not any(each.weight for each in sources):
        yield Finding("E0932", "no source has a weight above 0", "data.sources", "write `weight = 1` in one of them")
        return
    period = sum(whole([each.weight for each in sources]))
    if period > MAX_PERIOD:
        longest = max(sources, key=lambda each: len(repr(each.weight)))
        message = f"these weights are in whole proportions only of {period:,} samples: {MAX_PERIOD:,} are the most"
        hint = "write weights of fewer digits, as in `weight = 0.33`, or whole numbers, as in `weight = 1`"
        yield Finding("E0932", message, f"data.sources.{longest.name}.weight", hint)


def micro_batches_differ(spec: Spec) -> Iterator[Finding]:
    """Where each token sees all of its sequence, all sequences cost the same, and have no order by cost."""
    if spec.schedule.order == "cost" and not spec.data.masks_documents:
        message = "order = cost: a token sees all before it in its sequence, so all micro-batches cost the same"
        key, edit = ("data.chat", "chat { pack = true }") if spec.data.chat else ("data", "documents = masked")
        yield Finding("E0814", message, "schedule.order", f"remove `order`, or write `{edit}`", (("the data", key),))

"""The text that a run is trained on."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.rules.finding import Finding
from dsl.schema import Spec

STDLIB = "python_stdlib"


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
    if data.documents == "masked":
        message = "`documents` is about text: a conversation never sees another"
        hint = "leave it out; `pack = true` in `chat` puts several conversations into a sequence"
        yield Finding("E0931", message, "data.documents", hint, note)

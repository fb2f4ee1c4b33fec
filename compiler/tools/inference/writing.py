"""Completes text: encodes a prompt, generates tokens, and emits their text as soon as its characters are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers.decoders import DecodeStream

from compiler.tools.inference.conversations import Conversation, Conversations
from compiler.tools.inference.generation import Drafts, Sampler, generate_tokens, generate_with_drafts
from compiler.tools.inference.language_model import LanguageModel
from compiler.tools.inference.loaded import load_model
from compiler.tools.inference.sources import InferenceError, ModelSource
from compiler.tools.inference.token_streams import end_ids, read_tokenizer, require_tokenizer
from runtime.data import tokenizer as bpe


@dataclass(frozen=True)
class GeneratedText:
    """A completion. `stop`: the end token or stop word that ended it; "" if it reached the length limit."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # without the end token
    text: str
    stop: str
    drafts: Drafts


class TextWriter:
    """A model with its tokenizer and chat template. Special tokens in a text are encoded as such.

    `path`: the tokenizer.json. `template`: a chat template file; None: the one next to the tokenizer. `drafts`: use the
    MTP block for drafts, if there is one. Raises InferenceError if a file cannot be used.
    """

    def __init__(self, model: LanguageModel, path: Path, template: Path | None = None, drafts: bool = True) -> None:
        self.model, self.uses_drafts = model, drafts and model.can_draft
        self.tokenizer = read_tokenizer(path, model.vocab)
        self.conversations = Conversations(path, template)
        bpe.parse_special(self.tokenizer)
        self.end, *other_ends = end_ids(path, self.tokenizer)
        self._ends = frozenset((self.end, *other_ends))
        self._start = bpe.prefix_ids(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without a start token."""
        return bpe.encode(self.tokenizer, [text])[0]

    def begun(self, ids: Sequence[int], *, is_whole: bool = False) -> tuple[list[int], list[int]]:
        """Split the ids of a text into its start, at least one token, and the rest.

        The start is what the tokenizer prepends to texts, not repeated if the text has it already. If the tokenizer
        prepends nothing, it is the special token that the text begins with, else the end-of-document token.
        `is_whole`: a chat template rendered the text, so nothing is prepended.
        """
        if self._start and not is_whole:
            has_start = list(ids[: len(self._start)]) == self._start
            return self._start, list(ids[len(self._start) :] if has_start else ids)
        if ids and (is_whole or bpe.is_special(self.tokenizer, ids[0])):
            return list(ids[:1]), list(ids[1:])
        return [self.end], list(ids)

    def prompt(self, text: str) -> list[int]:
        """The prompt ids for continuing a text."""
        begin, body = self.begun(self.encode(text))
        return begin + body

    def reply_prompt(self, conversation: Conversation) -> list[int]:
        """The prompt ids for the assistant's next message, or for continuing the last one if it is the assistant's.
        Raises InferenceError if the template rejects the conversation or renders nothing."""
        is_open = conversation["messages"][-1]["role"] == "assistant"
        if ids := self.encode(self.conversations.text(conversation, is_open=is_open)):
            return ids
        raise InferenceError("the chat template renders nothing for this conversation")

    def write(
        self,
        begin: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        show: Callable[[str], None] = lambda _: None,
        until: Sequence[str] = (),
    ) -> GeneratedText:
        """Generate at most `max_tokens` tokens after a prompt. `show` receives the text piece by piece. The text ends
        before the first occurrence of a word of `until`."""
        drafts = Drafts()
        source = (
            generate_with_drafts(self.model, begin, sampler, drafts)
            if self.uses_drafts
            else generate_tokens(self.model, begin, sampler)
        )
        stream, tokens, stop = DecodeStream(skip_special_tokens=False), list[int](), ""
        text = ""
        for token in source:
            if token in self._ends:
                stop = self.tokenizer.id_to_token(token) or f"token {token}"
                break
            tokens.append(token)
            if piece := stream.step(self.tokenizer, token):
                text += piece
                show(piece)
            if places := [(place, word) for word in until if (place := text.find(word)) >= 0]:
                place, stop = min(places)
                text = text[:place]
                break
            if len(tokens) == max_tokens:
                break
        return GeneratedText(tuple(begin), tuple(tokens), text, stop, drafts)


def open_writer(
    source: ModelSource,
    dtype: str,
    *,
    average: bool,
    tokenizer: Path | None = None,
    drafts: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> TextWriter:
    """Open a writer for a source. `tokenizer`: a tokenizer.json that replaces the source's, with the chat template next
    to it. The other arguments are those of `load_model` and `TextWriter`. Raises InferenceError."""
    path = require_tokenizer(tokenizer or source.tokenizer)
    model = load_model(source, dtype, average=average, progress=progress)
    return TextWriter(model, path, None if tokenizer is not None else source.template, drafts)

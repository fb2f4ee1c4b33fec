"""Text for text: a prompt is encoded, tokens follow, and their text comes out as soon as it is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers.decoders import DecodeStream

from compiler.tools.inference.conversations import Conversation, Conversations
from compiler.tools.inference.generation import Drafts, Sampler, drafted, plain
from compiler.tools.inference.language_model import LanguageModel
from compiler.tools.inference.loaded import load_model
from compiler.tools.inference.sources import InferenceError, ModelSource
from compiler.tools.inference.token_streams import ends, read_tokenizer, required
from runtime.data import tokenizer as bpe


@dataclass(frozen=True)
class Written:
    """A completion. `stop`: the token with which the model ended it, or the word that ended it; "" if it reached its
    longest length."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # without the token that ends a document
    text: str
    stop: str
    drafts: Drafts


class TextWriter:
    """A model, its tokenizer and its chat template. Special tokens that are written in a text are tokens.

    `path`: the tokenizer.json. `template`: the file of a chat template; None: what lies beside the tokenizer. `drafts`:
    whether the MTP block drafts, where there is one. Raises InferenceError where a file cannot be used.
    """

    def __init__(self, model: LanguageModel, path: Path, template: Path | None = None, drafts: bool = True) -> None:
        self.model, self.drafts = model, drafts and model.drafts
        self.tokenizer = read_tokenizer(path, model.vocab)
        self.conversations = Conversations(path, template)
        bpe.parse_special(self.tokenizer)
        self.end, *others = ends(path, self.tokenizer)
        self._ends = frozenset((self.end, *others))
        self._start = bpe.in_front(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without a beginning."""
        return bpe.encode(self.tokenizer, [text])[0]

    def begun(self, ids: Sequence[int], *, is_whole: bool = False) -> tuple[list[int], list[int]]:
        """Divide the ids of a text into those that begin it, one at least, and the rest.

        What the tokenizer puts in front of texts begins it, once if the text has it too. A tokenizer that puts nothing
        there leaves it to a special token that the text begins with, else to the token between documents. `is_whole`:
        the text is what a chat template writes, so nothing is put in front.
        """
        if self._start and not is_whole:
            has_start = list(ids[: len(self._start)]) == self._start
            return self._start, list(ids[len(self._start) :] if has_start else ids)
        if ids and (is_whole or bpe.is_special(self.tokenizer, ids[0])):
            return list(ids[:1]), list(ids[1:])
        return [self.end], list(ids)

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that is to be continued."""
        begin, rest = self.begun(self.encode(text))
        return begin + rest

    def reply_prompt(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation in which the assistant speaks next, or goes on if the last message is its own.
        InferenceError if the template refuses the conversation, or writes nothing."""
        is_open = conversation["messages"][-1]["role"] == "assistant"
        if ids := self.encode(self.conversations.text(conversation, is_open=is_open)):
            return ids
        raise InferenceError("the chat template writes nothing for this conversation")

    def write(
        self,
        begin: Sequence[int],
        most: int,
        sampler: Sampler,
        show: Callable[[str], None] = lambda _: None,
        until: Sequence[str] = (),
    ) -> Written:
        """At most `most` tokens that follow those of a prompt. `show` gets text as it comes. The text ends before the
        first of `until` that is in it."""
        drafts = Drafts()
        source = drafted(self.model, begin, sampler, drafts) if self.drafts else plain(self.model, begin, sampler)
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
            if len(tokens) == most:
                break
        return Written(tuple(begin), tuple(tokens), text, stop, drafts)


def open_writer(
    source: ModelSource,
    dtype: str,
    *,
    average: bool,
    tokenizer: Path | None = None,
    drafts: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> TextWriter:
    """The writer of what a command is given. `tokenizer`: a tokenizer.json in the place of the source's own, with the
    chat template beside it; other arguments are those of `load_model` and `TextWriter`. Raises InferenceError."""
    path = required(tokenizer or source.tokenizer)
    model = load_model(source, dtype, average=average, progress=progress)
    return TextWriter(model, path, None if tokenizer is not None else source.template, drafts)

"""Text for text: a prompt is encoded, tokens follow, and their text comes out as soon as it is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from compiler.inference.generation import Drafts, drafted, plain
from compiler.inference.language_model import LanguageModel
from compiler.inference.sampling import Sampler
from runtime.data import tokenizer as bpe


@dataclass(frozen=True)
class Written:
    """What follows a prompt. `ended`: whether the model ended the document, or what it was to stop at came."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # without the token that ends a document
    text: str
    ended: bool
    drafts: Drafts


class Writer:
    """A model and its tokenizer. `ends`: ids that end a text, first the one that ends a document. `drafts`: whether the
    MTP block drafts, where there is one."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, ends: Sequence[int], drafts: bool = True) -> None:
        self.model, self.tokenizer, self.drafts = model, tokenizer, drafts and model.drafts
        self.end, self._ends = ends[0], frozenset(ends)

    def beginning(self) -> list[int]:
        """What a text begins with: what the tokenizer puts there, or else the token between documents."""
        return list(self.tokenizer.encode("").ids) or [self.end]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without a beginning."""
        return bpe.encode(self.tokenizer, [text])[0]

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that is to be continued."""
        return [*self.beginning(), *self.encode(text)]

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
        stream, tokens, ended = DecodeStream(skip_special_tokens=False), list[int](), False
        text = ""
        for token in source:
            if token in self._ends:
                ended = True
                break
            tokens.append(token)
            if piece := stream.step(self.tokenizer, token):
                text += piece
                show(piece)
            places = [place for word in until if (place := text.find(word)) >= 0]
            if places:
                text, ended = text[: min(places)], True
                break
            if len(tokens) == most:
                break
        return Written(tuple(begin), tuple(tokens), text, ended, drafts)

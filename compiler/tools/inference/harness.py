"""A model for lm-evaluation-harness: `DscModel("runs/quickstart")`.

See https://github.com/EleutherAI/lm-evaluation-harness. The class has the methods that the harness expects of a model,
but does not import it; docs/evaluating.md shows how to combine both.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from compiler.tools.inference.evaluation import NO_TARGET, TOKENS_AT_ONCE, Ids, padded_batch
from compiler.tools.inference.generation import Sampler
from compiler.tools.inference.sources import InferenceError, find_source
from compiler.tools.inference.writing import open_writer
from runtime.data import tokenizer as bpe

Window = tuple[Ids, Ids]  # tokens and their targets; NO_TARGET for tokens that are not scored


class Request(Protocol):
    """The part of the harness's `Instance` that is used."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class DscModel:
    """The model of a run, RUN@STEP or checkpoint, with the interface that the harness expects.

    `max_length`: the longest context in tokens; by default the length of training sequences. Raises InferenceError if
    the model cannot be loaded.
    """

    rank, world_size, max_gen_toks = 0, 1, 256

    def __init__(
        self,
        source: str,
        *,
        spec: str | None = None,
        tokenizer: str | None = None,
        dtype: str = "",
        average: bool = False,
        max_length: int | None = None,
    ) -> None:
        path = None if tokenizer is None else Path(tokenizer)
        self._writer = open_writer(find_source(source, spec), dtype, average=average, tokenizer=path)
        self.max_length = max_length or self._writer.model.sequence
        self.cache_hook: Any = None
        self._is_chat = False  # whether the chat template rendered the contexts

    # ------------------------------------------------------------ interface of the harness

    def loglikelihood(self, requests: Sequence[Request], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """For each (context, continuation): the log probability of the continuation, and whether greedy decoding would
        produce it."""
        sums = self._sums([self._after(*request.args) for request in requests])
        return self._cache_results("loglikelihood", requests, sums)

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = True) -> list[float]:
        """For each (text,): its log probability, in windows of at most `max_length` tokens."""
        parts = [list(self._rolling(request.args[0])) for request in requests]
        sums = iter(self._sums([window for windows in parts for window in windows]))
        totals = [sum(next(sums)[0] for _ in windows) for windows in parts]
        return self._cache_results("loglikelihood_rolling", requests, totals)

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = True) -> list[str]:
        """For each (context, settings): the generated text, up to a word of `until` or `max_gen_toks` tokens."""
        texts = [self._generate(context, settings) for context, settings in (request.args for request in requests)]
        return self._cache_results("generate_until", requests, texts)

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._writer.end

    @property
    def tokenizer_name(self) -> str:
        """A name that identifies the tokenizer and chat template; the harness caches requests under it."""
        parts = bpe.digest(self._writer.tokenizer) + (self._writer.conversations.template or "")
        return f"dsc-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The text of the chat template, or "" if `chat_template` is false. Raises InferenceError if there is none."""
        return self._writer.conversations.required_template if chat_template else ""

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Render a conversation, ending with the header of the assistant's turn or, without `add_generation_prompt`,
        with the last message's content. From then on nothing is prepended to contexts, as they are such texts. A system
        message that the template rejects is left out with a warning. Raises InferenceError if the template rejects the
        messages."""
        self._is_chat = True
        conversations, messages = self._writer.conversations, [*chat_history]
        try:
            return conversations.text({"messages": messages}, is_open=not add_generation_prompt)
        except InferenceError as error:
            without_system = [message for message in messages if message["role"] != "system"]
            if len(without_system) == len(messages):
                raise
            text = conversations.text({"messages": without_system}, is_open=not add_generation_prompt)
            warnings.warn(f"the system message is left out: {error}", stacklevel=2)
            return text

    def set_cache_hook(self, cache_hook: Any) -> None:
        self.cache_hook = cache_hook

    # ------------------------------------------------------------ windows

    def _after(self, context: str, continuation: str) -> Window:
        """The window of a continuation. Trailing spaces of a context belong to the first word after it; after a chat
        template only if one token spans both."""
        encode = self._writer.encode
        ids, context_ids = encode(context + continuation), encode(context)
        if not self._is_chat or ids[: len(context_ids)] != context_ids:
            context_ids = encode(context.rstrip())
        begin, body = self._writer.begun(ids, is_whole=self._is_chat)
        tokens = np.array([*begin, *body], np.int64)
        first = max(len(begin), len(tokens) - len(ids) + len(context_ids))
        targets = tokens[1:].copy()
        targets[: first - 1] = NO_TARGET
        return tokens[:-1][-self.max_length :], targets[-self.max_length :]

    def _rolling(self, text: str) -> Iterator[Window]:
        """Windows in which every token of a text is a target once. The last window overlaps the one before to be as
        long, so that its targets see as much context."""
        begin, body = self._writer.begun(self._writer.encode(text))
        tokens = np.array([*begin, *body], np.int64)
        done = len(begin)  # the start tokens are not targets
        while done < len(tokens):
            end = min(len(tokens), done + self.max_length)
            start = max(0, end - 1 - self.max_length)
            targets = tokens[start + 1 : end].copy()
            targets[: done - start - 1] = NO_TARGET
            yield tokens[start : end - 1], targets
            done = end

    def _sums(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """For each window: the log probability of its targets, and whether all of them have the largest logit."""
        at_once = max(1, TOKENS_AT_ONCE // self.max_length)
        order = sorted(range(len(windows)), key=lambda index: len(windows[index][0]))
        sums: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), at_once):
            members = order[first : first + at_once]
            tokens_BL, targets_BL = padded_batch([windows[index] for index in members])
            nats_BL, best_BL = self._writer.model.score(tokens_BL, targets_BL)
            greedy_B = (best_BL | (targets_BL < 0)).all(dim=1)
            sums |= zip(members, zip((-nats_BL.sum(dim=1)).tolist(), greedy_B.tolist(), strict=True), strict=True)
        return [sums[index] for index in range(len(windows))]

    def _generate(self, context: str, settings: Mapping[str, Any]) -> str:
        stop_words = settings.get("until") or ()
        max_tokens = int(settings.get("max_gen_toks") or self.max_gen_toks)
        sampled = settings.get("do_sample", True)
        temperature = float(settings.get("temperature") or 0.0) if sampled else 0.0
        sampler = Sampler(temperature, float(settings.get("top_p") or 1.0), int(settings.get("seed") or 0))
        words: Iterable[str] = (stop_words,) if isinstance(stop_words, str) else stop_words
        begin, body = self._writer.begun(self._writer.encode(context), is_whole=self._is_chat)
        return self._writer.write([*begin, *body][-self.max_length :], max_tokens, sampler, until=tuple(words)).text

    def _cache_results(self, name: str, requests: Sequence[Request], results: list[Any]) -> list[Any]:
        """Add results to the harness's cache, if it has set one, and return them."""
        for request, result in zip(requests, results, strict=True):
            if self.cache_hook is not None:
                self.cache_hook.add_partial(name, request.args, result)
        return results

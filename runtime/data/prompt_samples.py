"""The prompts of a run, drawn one after the other, and completions as text beside the rows of their prompts.

Draw i is a pure function of (seed, i): an epoch visits each prompt once, in an order of its own
(runtime/data/order.py).
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from runtime.contract import Plan
from runtime.data import store, tokenizer
from runtime.data.errors import DataError
from runtime.data.order import Order
from runtime.data.prompt_shards import PromptReader
from runtime.data.prompts import ANSWERS
from runtime.data.rewards.scoring import Case
from runtime.data.row_shards import Notices
from runtime.data.store import META
from runtime.data.tokenizer_files import TOKENIZER, special_tokens

Ids = npt.NDArray[np.int64]


def open_prompts(plan: Plan, folder: Path) -> PromptSamples:
    """The prompts that a run of `train.grpo` draws. `folder`: its prepared data, `Loop.corpus`.

        prompts = open_prompts(plan, loop.corpus)           # on each rank; ranks share nothing but the files
        for note in prompts.survey.notes(): say(f"data: {note}")   # once, before ranks begin
        ids = prompts.prompt(i // group)                    # of the sequence with number i of the run
        case = prompts.case(i // group, completion)         # ids as they were generated, the end among them or not
        prompts.end                                         # the id that ends a completion
        prompts.epochs(position.next)                       # how often each prompt was drawn
        prompts.survey.facts                                # of the event "rows"

    Raises DataError where no prompt is left, or where `check = exact` has no answer to compare with.
    """
    assert plan.train.grpo is not None
    grpo, meta = plan.train.grpo, json.loads((folder / META).read_text("utf-8"))
    if plan.data.prompts is None or "prompts" not in meta:
        raise DataError(f"{folder}: these are no prompts")
    unanswered = meta["prompts"]["unanswered"]["train"]
    if unanswered["rows"] and any(each.check == "exact" for each in grpo.rewards):
        named = ", ".join(f'"{each}"' for each in ANSWERS)
        raise DataError(
            f"{unanswered['rows']:,} of {meta['splits']['train']['documents']:,} prompts have no answer, which "
            f"`check = exact` compares with: none of {named} is there. Name where it is: `prompts {{ answer = … }}`; "
            f"`dsc data show --row {unanswered['first']}` shows the first"
        )
    return PromptSamples(folder, grpo.prompt, grpo.group, plan.train.seed, meta["tokenizer"]["end_of_document"])


class Survey:
    """The prompts of one split, and which of them are drawn: those of at most `longest` tokens. `numbers`: of these."""

    def __init__(self, folder: Path, split: str, longest: int) -> None:
        self.reader, self._longest = PromptReader(folder / split), longest
        self._notices = Notices.of((store.meta_of(folder) or {}).get("prompts", {}))
        self.numbers = np.flatnonzero(self.reader.sizes <= longest)
        rows, samples = self.reader.num_prompts, len(self.numbers)
        self.facts = {"rows": rows, "samples": samples, "padding": 0, "cut": 0, "dropped": rows - samples}
        self.facts["without_loss"] = 0  # these are of conversations

    def notes(self) -> list[str]:
        """Return a sentence for prompts that are left out, and for those whose tokens may surprise."""
        rows, dropped = (self.facts[name] for name in ("rows", "dropped"))
        longest = f"the longest has {self.reader.sizes.max(initial=0):,}"
        why = f"have more than `prompt = {self._longest}` tokens, and are left out; {longest}"
        return [f"{dropped:,} of {rows:,} prompts {why}"] * bool(dropped) + self._notices.notes()


class PromptSamples:
    """The prompts of the training split of a prepared folder that have at most `longest` tokens.

    `group`: completions of each. `end`: the id that ends a completion, `eos_token` of the tokenizer. Raises DataError
    where no prompt is left.
    """

    def __init__(self, folder: Path, longest: int, group: int, seed: int, end: int) -> None:
        self.group, self.end = group, end
        self.survey = Survey(folder, "train", longest)
        num = len(self.survey.numbers)
        if not num:
            raise DataError(f"no prompt is left: {'; '.join(self.survey.notes())}")
        self.order = Order(group, num * group, seed)  # of completions: an epoch has `group` of each prompt
        self._drawn = Order(1, num, seed)
        self._path = folder / TOKENIZER

    @cached_property
    def _bpe(self) -> Tokenizer:
        """The tokenizer, which only ranks that score completions need, and no process from which ranks are forked."""
        return tokenizer.parse(tokenizer.read(self._path), special_tokens(self._path).get("eos_token"))

    # ---- prompts by the number of their draw

    def number(self, index: int) -> int:
        """Which row of the split draw `index` is, from 0."""
        return int(self.survey.numbers[self._drawn.window(index)])

    def prompt(self, index: int) -> Ids:
        """The token ids of draw `index`."""
        return self.survey.reader.ids(self.number(index))

    def case(self, index: int, completion: Ids) -> Case:
        """What rewards are given of a completion of draw `index`: its text up to the end token, without special tokens.

        The prompt of messages is what the chat template makes of them, special tokens written out.
        """
        row = self.survey.reader.row(self.number(index))
        ends = np.flatnonzero(completion == self.end)
        text = self._bpe.decode(completion[: ends[0] if len(ends) else None].tolist(), skip_special_tokens=True)
        if isinstance(row["prompt"], str):
            return Case(row["prompt"], text, row["columns"])
        return Case(tokenizer.decode(self._bpe, self.prompt(index).tolist()), text, row["columns"], row["prompt"])

    def epochs(self, sequences: int) -> float:
        """How often each prompt was drawn once a run has had so many completions."""
        return sequences / self.order.windows

"""Fixed completions, used by the ranks of a test and by its reference, and their rewards.

N: sequences of a step; C: tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.rl.generator import Rollouts

NUM_REWARDS = 2


def earned(prompt: npt.NDArray[np.int64], completion: npt.NDArray[np.int64]) -> list[float]:
    """Two rewards, which only depend on the tokens: the first is 0 or 1, the second 0 to 2."""
    return [float(completion.sum() % 2), float((prompt[-1] + completion[0]) % 5) / 2]


@dataclass(frozen=True)
class Given:
    """Completions of a step. `prompts`: of each sequence; after the end of a completion, tokens are −1, logprobs 0."""

    prompts: Sequence[npt.NDArray[np.int64]]
    tokens_NC: Tensor
    old_NC: Tensor
    reference_NC: Tensor

    @property
    def completions(self) -> list[npt.NDArray[np.int64]]:
        return [tokens_C[tokens_C >= 0].numpy() for tokens_C in self.tokens_NC]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        prompts = {f"prompt_{i:03}": torch.tensor(prompt) for i, prompt in enumerate(self.prompts)}
        save_file({"tokens": self.tokens_NC, "old": self.old_NC, "reference": self.reference_NC} | prompts, path)

    @staticmethod
    def load(path: Path) -> Given:
        tensors = load_file(path)
        prompts = [tensors[name].numpy() for name in sorted(tensors) if name.startswith("prompt_")]
        return Given(prompts, tensors["tokens"], tensors["old"], tensors["reference"])


@dataclass
class Replay:
    """Replaces generation, prompts, scoring and weight swaps by the files of a folder, one for each rollout of `num`
    sequences."""

    folder: Path
    num: int
    group: int

    def _of(self, number: int) -> Given:
        return Given.load(self.folder / f"{number // self.num}.safetensors")

    def generate(self, prompts: Sequence[Any], numbers: Sequence[int], columns: Sequence[int]) -> Rollouts:
        assert len(numbers) == len(columns) == self.num and numbers[0] % self.num == 0
        self.last = self._of(numbers[0])
        assert all(np.array_equal(*pair) for pair in zip(prompts, self.last.prompts, strict=True))
        tokens_NC, old_NC = self.last.tokens_NC.numpy(), self.last.old_NC.numpy()
        return Rollouts(prompts, tokens_NC, old_NC, np.ones_like(old_NC))

    def log_probabilities(self, rollouts: Rollouts, columns: Sequence[int]) -> npt.NDArray[np.float64]:
        return self.last.reference_NC.numpy()

    def swap(self) -> None:
        """Do nothing: the log-probabilities of the reference are fixed."""

    def prompt(self, index: int) -> npt.NDArray[np.int64]:
        first = index * self.group
        return self._of(first).prompts[first % self.num]

    def case(self, index: int, completion: npt.NDArray[np.int64]) -> Any:
        return self.prompt(index), completion

    def score(self, cases: Sequence[Any]) -> npt.NDArray[np.float64]:
        return np.array([earned(*case) for case in cases]).reshape(-1, NUM_REWARDS)

    def close(self) -> None:
        """Do nothing: there is no process."""

"""What a trainer needs of the policy of a run that learns from rewards (runtime/rl/policy.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.step.micro_batches import Indices


class RolloutSource(Protocol):
    """Completions and rewards for the sequences of a step, in the place of samples of text."""

    @property
    def iterations(self) -> int:
        """Steps on the same completions."""

    def comes_again(self, step: int) -> bool:
        """Whether the step after step number `step`, from 0 on, trains on the same completions."""

    def roll_out(self, step: int, drawn: Indices) -> None:
        """Have completions of the sequences `drawn`: those that are there, or new ones by the present weights."""

    def micro_batches(self, device: torch.device) -> dict[str, Tensor]:
        """What the micro-batches of this column read, by name: [micro-batch, token]."""

    def compare(self, reported: Mapping[int, Tensor], data: Mapping[str, Tensor]) -> None:
        """Compare the log-probabilities of the training forward, by micro-batch, with those of generation."""

    def row(self) -> dict[str, Any]:
        """What the row of a step says of its rollouts."""

"""What a trainer starts with: a position in the data, weights, and what the run remembers of its steps."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.checkpoint.loading import LoadedCheckpoint
from runtime.contract import RunPlan
from runtime.contract.names import has_average
from runtime.data.position import Position
from runtime.observe.health.judge import Recent
from runtime.state import snapshot
from runtime.state.snapshot import Read
from runtime.state.state import State
from runtime.step.executor import ActionBoard


@dataclass(frozen=True)
class Start:
    """By default the first sample, and the weights that the build's seed gives.

    weights: a checkpoint from which weights alone are taken; `put` says which. saved: a checkpoint to resume from,
    which has everything: weights, the state of the optimizer, the loads of experts, the step.
    """

    position: Position = field(default_factory=Position)
    recent: Recent = field(default_factory=Recent)
    weights: LoadedCheckpoint | None = None
    put: Callable[[State, Read, Container[str]], None] = snapshot.put_weights
    saved: LoadedCheckpoint | None = None

    @property
    def step(self) -> int:
        """Steps that were trained before."""
        return self.saved.step if self.saved else 0

    def put_weights(self, state: State, board: ActionBoard) -> None:
        """Write the initial weights into `state`."""
        if self.weights is not None:
            board.set_action("load initial weights")
            self.put(state, self.weights.read, self.weights.shapes)

    def put_saved(self, state: State, board: ActionBoard) -> None:
        """Write everything that was saved into `state`."""
        if self.saved is not None:
            board.set_action("load checkpoint")
            snapshot.put(state, self.saved.read, averaged=has_average(self.saved.shapes))

    def loads(self, plan: RunPlan) -> dict[str, Tensor]:
        """Tokens that each expert of each layer got in the steps before: int64 [experts]."""
        none = {layer.name: torch.zeros(layer.experts, dtype=torch.int64) for layer in plan.moe_layers}
        saved = self.saved.meta["loads"] if self.saved else {}
        return none | {name: torch.tensor(load) for name, load in saved.items()}

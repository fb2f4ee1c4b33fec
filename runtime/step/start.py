"""The start of a trainer: a position in the data, weights, and the recent steps that the run remembers."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.checkpoint.loading import LoadedCheckpoint
from runtime.contract import RunPlan
from runtime.contract.names import has_average
from runtime.data.position import Position
from runtime.observe.health.judge import RecentSteps
from runtime.state import snapshot
from runtime.state.snapshot import Read
from runtime.state.state import State
from runtime.step.executor import ActionBoard


@dataclass(frozen=True)
class Start:
    """The state that a trainer starts with. By default the first sample, and weights from the seed of the build.

    weights: a checkpoint of which only the weights are loaded, by `load`. saved: a checkpoint to resume from, with
    weights, optimizer state, loads of experts and the step.
    """

    position: Position = field(default_factory=Position)
    recent: RecentSteps = field(default_factory=RecentSteps)
    weights: LoadedCheckpoint | None = None
    load: Callable[[State, Read, Container[str]], None] = snapshot.put_weights
    saved: LoadedCheckpoint | None = None

    @property
    def step(self) -> int:
        """Number of steps that were trained before."""
        return self.saved.step if self.saved else 0

    def put_weights(self, state: State, board: ActionBoard) -> None:
        """Write the initial weights into `state`."""
        if self.weights is not None:
            board.set_action("load initial weights")
            self.load(state, self.weights.read, self.weights.shapes)

    def put_saved_state(self, state: State, board: ActionBoard) -> None:
        """Write the whole saved state into `state`."""
        if self.saved is not None:
            board.set_action("load checkpoint")
            snapshot.put_state(state, self.saved.read, averaged=has_average(self.saved.shapes))

    def loads(self, plan: RunPlan) -> dict[str, Tensor]:
        """Return the tokens that each expert of each layer got in the steps before: int64 [experts]."""
        zeros = {layer.name: torch.zeros(layer.experts, dtype=torch.int64) for layer in plan.moe_layers}
        saved = self.saved.meta["loads"] if self.saved else {}
        return zeros | {name: torch.tensor(load) for name, load in saved.items()}

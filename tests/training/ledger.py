"""Live bytes of a running rank, measured: after every statement of an emitted body, the storages that values,
messages and exchanges hold. `python -m tests.training.ledger FOLDER WORLD` leaves FOLDER/rank_<r>.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from runtime.build import Build
from runtime.comm.transport import Pending, Route
from runtime.executor import Executor
from runtime.heartbeat import Board
from runtime.launch import launch
from runtime.trainer import Trainer
from tests.training.samples import RandomSamples


class Ledger:
    """Peak live bytes of one program. A route counts as the two rows of expert counts that it stands for."""

    def __init__(self, executor: Executor, num_experts: int, num_groups: int) -> None:
        self.executor, self.peak = executor, 0
        self.route_bytes, self.offsets_bytes = 2 * num_experts * 8, num_groups * 4
        self.rows: dict[str, int] = {}

    def measure(self) -> None:
        storages: dict[int, int] = {}
        extra = 0
        for thing in self.things():
            if isinstance(thing, Route):
                extra += self.route_bytes
            else:
                loaded = any(thing.data_ptr() - d.data_ptr() in range(0, d.nbytes) for d in self.data if d.nbytes)
                storages[thing.data_ptr()] = max(
                    storages.get(thing.data_ptr(), 0), thing.nbytes if loaded else size(thing)
                )
        counting = sum(name.startswith("counts") for name in self.executor.exchange.pending)
        total = sum(storages.values()) + extra + counting * (self.route_bytes + self.offsets_bytes)
        self.peak = max(self.peak, total)

    @property
    def data(self) -> list[Tensor]:
        return list(self.executor.data.values())

    def things(self) -> Iterator[Any]:
        for space in self.executor._values.values():
            yield from vars(space).values()
        pending: list[Pending] = [*self.executor._posted.values(), *self.executor._sent.values()]
        for name, exchanges in self.executor.exchange.pending.items():
            pending += [] if name.startswith("counts") else exchanges
        yield from (p.result for p in pending)
        yield from self.executor._kept.values()

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if "/stages/" not in frame.f_code.co_filename:
            return None
        self.measure()
        return self.trace


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def measured(build: Build, rank: int, board: Board) -> dict[str, Any]:
    plan = build.plan
    samples = RandomSamples(plan["model"]["vocab"], plan["train"]["sequence"])
    trainer = Trainer(build, rank, samples, samples, board)
    num_experts = max((layer["experts"] for layer in plan["moe_layers"]), default=0)
    ledger = Ledger(trainer.executor, num_experts, num_experts)  # E_local · sources = E
    wait = trainer.executor.exchange.wait_counts

    def wait_counts(name: str) -> tuple[Route, Tensor]:
        route, offsets = wait(name)
        action, _, site = name.removeprefix("counts ").partition("@")
        ledger.rows[f"{site} {action.partition('.')[2]}"] = sum(route.received)
        return route, offsets

    trainer.executor.exchange.wait_counts = wait_counts  # type: ignore[method-assign]
    sys.settrace(ledger.trace)
    trainer.accumulate()
    sys.settrace(None)
    return {"peak": ledger.peak, "rows": ledger.rows}


def main(folder: Path, world: int) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        text = json.dumps(measured(Build.open(folder / "build"), rank, board))
        (folder / f"rank_{rank}.json").write_text(text)

    outcome = launch(target, world, folder=folder, hang_timeout_s=120)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

"""Runs of real ranks with an injected fault: a wrong number, a flipped bit of a weight, or a killed process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from runtime.build.build import Build
from runtime.run import starts
from runtime.run.begin import RunOptions
from runtime.step.trainer import Sums, Trainer
from runtime.system.lines import read_rows
from tests.runtime.processes import forked
from tests.runtime.step.recorded import Recorded

Fault = Callable[[Trainer], None]  # changes a new trainer


def train(build: Path, run: Path, corpus: Path, steps: int, *faults: Fault, code: int = 0, **options: Any) -> None:
    """Train with faults, including restarts, as `dsc train --out RUN --steps N`. Asserts the exit code `code`."""
    usual: dict[str, Any] = {"hang_timeout_s": 30.0, "device": "cpu", "transport": "auto", "profile": None}
    usual |= {"resume": False, "skip_batch": False, "cache": None, "start_timeout_s": 30.0}
    chosen = RunOptions(run=run, data=corpus, steps=steps, **usual | options)
    initialize = Trainer.__init__

    def make(self: Trainer, *args: Any, **words: Any) -> None:
        initialize(self, *args, **words)
        for fault in faults:
            fault(self)

    def main() -> int:
        run.mkdir(exist_ok=True)
        sys.stdout = sys.stderr = (run / "said.txt").open("a", 1, "utf-8")
        with mock.patch.object(Trainer, "__init__", make):
            return starts.train(Build.open(build), chosen, corpus)

    with forked(main) as process:
        exit_code = process.exit_code()
    assert exit_code == code, said(run)


def said(run: Path) -> str:
    """The output of all starts of a run."""
    return (run / "said.txt").read_text("utf-8")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind, without their times."""
    rows = [dict(row) for row in read_rows(run / "events.jsonl").rows if row["event"] == kind]
    return [{name: value for name, value in row.items() if name not in ("time", "event")} for row in rows]


def upcoming(trainer: Trainer) -> set[int]:
    """The samples of the next step."""
    return {*trainer._draw(trainer.position).tolist()}


def nan_weight(rank: int, samples: set[int], times: int | None = None, marker: Path | None = None) -> Fault:
    """Weights of one rank are NaN while it computes any of these samples, at most `times` times over all processes."""

    def fault(trainer: Trainer) -> None:
        real = trainer.accumulate

        def accumulate() -> Sums:
            if trainer.rank != rank or not samples & upcoming(trainer) or not _again(marker, times):
                return real()
            weight = trainer.state.buckets[-1].parameters
            was = weight.clone()
            weight.fill_(float("nan"))
            trainer.quantised_at = -1  # quantised weights are computed from them again
            try:
                return real()
            finally:
                weight.copy_(was)
                trainer.quantised_at = -1

        trainer.accumulate = accumulate  # type: ignore[method-assign]

    return fault


def _again(marker: Path | None, times: int | None) -> bool:
    """Whether a fault has happened fewer than `times` times, counted in a file; counts one more."""
    if times is None or marker is None:
        return True
    with marker.open("a+", encoding="utf-8") as file:
        file.seek(0)
        if len(file.read()) >= times:
            return False
        file.write("x")
    return True


def loss_times(factor: float, samples: set[int]) -> Fault:
    """The loss of steps with these samples is multiplied by `factor`."""

    def fault(trainer: Trainer) -> None:
        real = trainer._losses

        def losses(sums: Sums) -> dict[str, float]:
            values = real(sums)
            return values | {"loss": values["loss"] * (factor if samples & {*trainer.batch.samples.tolist()} else 1)}

        trainer._losses = losses  # type: ignore[method-assign]

    return fault


def behind_step(step: int, rank: int, do: Callable[[Trainer], None]) -> Fault:
    """Call `do` on a rank after a step, each time that the step is trained."""

    def fault(trainer: Trainer) -> None:
        real = trainer.train_step

        def train_step() -> dict[str, Any]:
            row = real()
            if trainer.rank == rank and trainer.step == step:
                do(trainer)
            return row

        trainer.train_step = train_step  # type: ignore[method-assign]

    return fault


def killed_behind(step: int, marker: Path) -> Fault:
    """Rank 0 is killed after a step, the second time that the step is trained."""

    def end(trainer: Trainer) -> None:
        with marker.open("a+", encoding="utf-8") as file:
            file.write("x")
        if marker.read_text("utf-8") == "xx":
            os._exit(9)

    return behind_step(step, 0, end)


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of an element of a contiguous tensor."""
    data = tensor.detach().view(-1)[element : element + 1].view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8


def recorded(out: Path) -> Fault:
    """For each attempt at a step, rank 0 writes a line [step, number of sums over the world]."""

    def fault(trainer: Trainer) -> None:
        if trainer.rank:
            return
        sums, real = Recorded(trainer), trainer.train_step

        def train_step() -> dict[str, Any]:
            sums.asked.clear()
            try:
                return real()
            finally:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(sums.asked) + "\n")

        trainer.train_step = train_step  # type: ignore[method-assign]

    return fault

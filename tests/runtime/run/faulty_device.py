"""A device that computes wrongly, in a real run and in replays of it. All processes of `tests.forks` call `install`.

The environment says which: FAULTY_DEVICE is the JSON of a Faulty. The fault is bound to the number of a device, and not
to a rank: whichever rank computes there makes something wrong of the same numbers.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import runtime.ops
from runtime.run import loop
from runtime.step.trainer import Trainer

VARIABLE = "FAULTY_DEVICE"


@dataclass(frozen=True)
class Faulty:
    """From `step` on the first product of each step on the device is times `factor`, in its last element. `once`: a
    file that is made by the first such product, behind which there is no other."""

    device: int
    step: int
    factor: float = math.nan
    once: str = ""

    def environment(self) -> dict[str, str]:
        """What makes `tests.forks` do it."""
        return {"FORKS_RUN_FIRST": __name__, VARIABLE: json.dumps(asdict(self))}


class _Process:
    """What this process, which may be a rank, is about to compute."""

    is_patched, device, errs = False, -1, False


def install() -> None:
    """Let the device of the environment compute wrongly in this process and in those it forks."""
    if _Process.is_patched:
        return
    _Process.is_patched, faulty = True, Faulty(**json.loads(os.environ[VARIABLE]))
    take, accumulate, linear = loop.take, Trainer.accumulate, runtime.ops.linear

    def taken(kind: str, number: int) -> torch.device:
        _Process.device = number
        return take(kind, number)

    def accumulated(trainer: Trainer) -> Any:
        _Process.errs = _Process.device == faulty.device and trainer.step + 1 >= faulty.step
        return accumulate(trainer)

    def product(*words: Any) -> Tensor:
        found = linear(*words)
        if _Process.errs:
            _Process.errs = False
            if not faulty.once or not Path(faulty.once).exists():
                found.view(-1)[-1] *= faulty.factor
                if faulty.once:
                    Path(faulty.once).touch()
        return found

    loop.take, Trainer.accumulate, runtime.ops.linear = taken, accumulated, product  # type: ignore[method-assign]

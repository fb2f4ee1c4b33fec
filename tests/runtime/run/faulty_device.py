"""A device that computes wrong numbers, in a real run and its replays. All processes of `tests.forks` call `install`.

The environment variable FAULTY_DEVICE has the JSON of a Faulty. The fault belongs to a device number, not to a rank:
whichever rank computes there gets wrong results.
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
    """From `step` on, the last element of the first product of each step on the device is multiplied by `factor`.
    `once`: a file that the first such product creates; once it exists, there are no more faults."""

    device: int
    step: int
    factor: float = math.nan
    once: str = ""

    def environment(self) -> dict[str, str]:
        """The environment that makes `tests.forks` install it."""
        return {"FORKS_RUN_FIRST": __name__, VARIABLE: json.dumps(asdict(self))}


class _Process:
    """What this process, perhaps a rank, is about to compute."""

    is_patched, device, errs = False, -1, False


def install() -> None:
    """Make the device of the environment compute wrong numbers in this process and its forks."""
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
        result = linear(*words)
        if _Process.errs:
            _Process.errs = False
            if not faulty.once or not Path(faulty.once).exists():
                result.view(-1)[-1] *= faulty.factor
                if faulty.once:
                    Path(faulty.once).touch()
        return result

    loop.take, Trainer.accumulate, runtime.ops.linear = taken, accumulated, product  # type: ignore[method-assign]

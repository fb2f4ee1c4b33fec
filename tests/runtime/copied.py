"""A run of one rank that copies its checkpoints to one place, in the test's thread."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint.copies import Copier, CopyResult
from runtime.checkpoint.places import CopyPlace, Inventory
from runtime.checkpoint.publish import Publisher, RetentionPolicy, SaveResult, TensorPart, load
from runtime.checkpoint.restore import restore


class Alone:
    """A stand-in for a process group of one rank."""

    def all(self, yes: bool) -> bool:
        return yes

    def broadcast(self, numbers: list[int]) -> list[int]:
        return numbers


def tensors(step: int) -> dict[str, Tensor | TensorPart]:
    return {"weight/w": torch.full((64,), float(step)), "weight/v": torch.arange(5.0) + step}


class Run:
    """A run of one rank with one place; `save` saves and copies in this thread."""

    def __init__(self, folder: Path, place: CopyPlace, keep: int = 1, elsewhere: Inventory | None = None) -> None:
        self.folder, self.place = folder, place
        checkpoints = folder / "checkpoints"
        self.copier = Copier(place, checkpoints, 0, RetentionPolicy(keep), Alone())
        self.copier._thread = threading.current_thread()  # only `copy` copies
        inventories = (elsewhere,) if elsewhere else ()
        self.publisher = Publisher(
            checkpoints, 0, 1, lambda: None, RetentionPolicy(keep), self.copier.held_names, *inventories
        )

    def publish(self, step: int) -> SaveResult:
        saved = self.publisher.save(step, tensors(step), {"of": step})
        self.copier.offer(step, saved)
        return saved

    def copy(self) -> list[CopyResult]:
        self.copier._copy_next()
        return [*self.copier.finished_copies()]

    def save(self, step: int) -> list[CopyResult]:
        self.publish(step)
        return self.copy()


def taken_back(folder: Path, place: CopyPlace) -> int:
    """Fetch the newest good checkpoint of a place into a folder that has none. Returns its step."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    notes: list[str] = []
    if restore(folder, [place], notes.append) is None:
        return 0
    checkpoint = load(folder / "checkpoints")
    assert checkpoint.refused == () and torch.equal(
        checkpoint.read(["weight/w"])["weight/w"], tensors(checkpoint.step)["weight/w"]
    )
    return checkpoint.step

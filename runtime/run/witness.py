"""Fingerprints of the inputs and outputs of each rank in a replay. They show which rank computed a different result.

A rank writes a file `witness/rank_<r>.jsonl`. Its first line has the host and the device of the rank:

    {"rank": 1, "host": "node7", "device": "core 1"}

Each computation of a step adds a line with 64-bit fingerprints of everything that the rank received (`<`) and of
everything that it produced (`>`), in order:

    {"step": 5, "last_sample": 39, "numbers": "9f…", "names": ["> state", "< weights", "> send 1 F0 0", …],
     "prints": "3c…", "not_finite": [7]}

`names` is null if they equal those of the line before. `numbers` is the fingerprint of the losses, loads and gradients
of the rank, as in the event `bad_step` of a run. `not_finite` has the indices of tensors with a non-finite value. If
the first difference of a rank from another replay is a `>`, the rank got the same inputs and computed another output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.comm.transport import Shares, Sums, Work
from runtime.observe.health.replicas import fingerprint
from runtime.observe.health.rerun import print_of
from runtime.run.observers import Observer
from runtime.step.executor import Executor
from runtime.step.sharding import WholeTensors
from runtime.step.trainer import Trainer
from runtime.system.regular_files import open_regular

FOLDER = "witness"
GIVES = (
    *("send", "counts", "dispatch", "combine", "gather_rows", "scatter_rows", "gather_sequences"),
    *("scatter_sequences", "scatter", "gather_choices", "record", "tell"),
)
GETS = (
    *("receive", "wait_counts", "wait_dispatch", "wait_combine", "wait_gather_rows", "wait_scatter_rows"),
    *("wait_gather_sequences", "wait_scatter_sequences", "wait_gather", "wait_gather_choices", "wait_scatter"),
)


class Witness(Observer):
    """Watches a trainer, and writes fingerprints of its rank's inputs and outputs in each step into the run folder."""

    def __init__(self, trainer: Trainer, run: Path, place: Mapping[str, str]) -> None:
        """`place`: host and device of the rank. OSError if the file cannot be written."""
        (run / FOLDER).mkdir(exist_ok=True)
        path, flags = run / FOLDER / f"rank_{trainer.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file = os.fdopen(open_regular(path, flags), "w", encoding="utf-8")
        self._trainer, self._compute = trainer, trainer.accumulate
        self._watches = False
        self._norm, self._timed = trainer._norm, Tensor()  # the norm is followed by seconds, which always differ
        self._names, self._before = list[str](), list[str]()
        self._prints, self._not_finite = list[Tensor](), list[int]()
        self._write({"rank": trainer.rank, **place})
        for name in GIVES:
            _wrap(trainer.executor, name, self._record_arguments)
        for name in GETS:
            _wrap(trainer.executor, name, self._record_result)
        trainer.links.sums = _WitnessedSums(trainer.links.sums, trainer.rank, self.record)
        trainer.accumulate, trainer._norm = self._accumulate, self._norm_seen  # type: ignore[method-assign]

    def close(self) -> None:
        self._file.close()

    def record(self, direction: str, name: str, *tensors: Tensor) -> None:
        """Record tensors that the rank received or produced, if it is computing a step."""
        if not self._watches:
            return
        for tensor in (argument[:1] if argument is self._timed else argument for argument in tensors):
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                self._not_finite.append(len(self._names))
            self._names.append(f"{direction} {name}")
            self._prints.append(fingerprint(tensor.contiguous()).to("cpu"))

    def _accumulate(self) -> dict[str, Tensor]:
        state = self._trainer.state
        self._watches = True
        for piece in (piece for bucket in state.buckets for piece in bucket.owned):
            self.record(">", "state", piece.master, *piece.state.values())
        self.record("<", "weights", *(bucket.parameters for bucket in state.all_buckets), *state.biases.values())
        try:
            sums = self._compute()
            self.record(">", "gradients", *(bucket.gradients for bucket in state.buckets if not bucket.is_reduced))
        finally:
            self._watches = False
        self._end()
        return sums

    def _norm_seen(self) -> Tensor:
        self._timed = self._norm()
        return self._timed

    def _end(self) -> None:
        """Write the line of a computation."""
        trainer, names = self._trainer, self._names
        numbers = print_of(trainer.records(), trainer.state)
        prints = "".join(map(as_hex, [int(value) for value in self._prints]))
        self._write(
            {
                "step": trainer.step + 1,
                "last_sample": int(trainer.batch.samples[-1]),
                "numbers": as_hex(numbers),
                "names": names if names != self._before else None,
                "prints": prints,
                "not_finite": self._not_finite,
            }
        )
        self._before, self._names, self._prints, self._not_finite = names, [], [], []

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._file.flush()

    def _record_arguments(self, name: str, call: Callable[..., Any], words: tuple[Any, ...]) -> Any:
        self.record(">", _event_name(name, words), *_tensors(words))
        return call(*words)

    def _record_result(self, name: str, call: Callable[..., Any], words: tuple[Any, ...]) -> Any:
        result = call(*words)
        of_site = (bucket.gradients for bucket in self._trainer.state.buckets if words[-1] in bucket.sites)
        self.record("<", _event_name(name, words), *(of_site if name == "wait_scatter" else _tensors(result)))
        return result


class _WitnessedSums:
    """The sums of a rank, recorded on their way to the transport."""

    def __init__(self, sums: Sums, rank: int, record: Callable[..., None]) -> None:
        self._sums, self._rank, self._record = sums, rank, record

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        self._record(">", "sum", tensor)
        self._sums.all_reduce(tensor, largest)
        self._record("<", "sum", tensor)

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        self._record(">", f"reduce {bucket}", flat)
        own_parts = [flat[part] for part in shares[holders.index(self._rank)]] if shares else [flat]
        record_result = partial(self._record, "<", f"reduce {bucket}", *own_parts)
        return _PendingSum(self._sums.start_reduce(bucket, holders, flat, shares), record_result)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        self._sums.gather(bucket, holders, flat, shares)


@dataclass(frozen=True)
class _PendingSum:
    """A pending sum, and a function to call when it is done."""

    work: Work
    done: Callable[[], None]

    def wait(self) -> None:
        self.work.wait()
        self.done()


def as_hex(number: int) -> str:
    """Return 64 bits as 16 hexadecimal digits."""
    return f"{number & (1 << 64) - 1:016x}"


def _wrap(executor: Executor, name: str, wrapper: Callable[..., Any]) -> None:
    call = getattr(executor, name)
    setattr(executor, name, lambda *words: wrapper(name, call, words))


def _event_name(name: str, words: tuple[Any, ...]) -> str:
    return " ".join([name, *(str(word) for word in words if isinstance(word, str | int))])


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or a result of the executor."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, WholeTensors):
        yield value.flat
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)

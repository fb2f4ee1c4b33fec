"""memory/rank_<r>.json: the peak memory of a rank in the first step that a run trains with a build, and the rows that
the rank received.

    {"step": 1, "program": "train_8", "of": "5c0f…", "peak": 1048576, "rows": {"L3 0": 212, …}}

The peak is measured: after every statement of an emitted body, the ledger sums the storages that values, messages and
exchanges hold. `of` is the digest of the build. `rows` has the received rows of each layer and micro-batch, with
padding. If tokens are routed through nodes, each entry is [rows, forwarded copies, forwarded rows]. If the plan is
simulated with these row counts, its peak equals this one to the byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor

from runtime.comm.exchange import Route
from runtime.comm.nodes import NodeRoute
from runtime.comm.transport import Pending
from runtime.contract.names import ExchangeName
from runtime.step.executor import Executor
from runtime.step.sharding import WholeTensors
from runtime.system.regular_files import read_bytes, write


def has_ledger(run: Path, rank: int, build: str) -> bool:
    """Whether a run folder has a ledger of the rank for this build. `build`: as in `Ledger.write`."""
    try:
        return bool(json.loads(read_bytes(_path(run, rank)))["of"] == build)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _path(run: Path, rank: int) -> Path:
    return run / "memory" / f"rank_{rank}.json"


class Ledger:
    """Measures the peak live bytes of an executor inside `with`. A route counts as two int64 counts per expert.
    `num_experts`: experts of a layer, over all ranks."""

    def __init__(self, executor: Executor, num_experts: int) -> None:
        self.executor, self.peak, self.rows = executor, 0, dict[str, int | tuple[int, int, int]]()
        # bytes of a route, and of the offsets of this rank's experts
        self.route_bytes, self.offsets_bytes = 2 * num_experts * 8, num_experts // executor.exchange.size * 4
        self._table_bytes: dict[str, int] = {}  # by exchange of counts, the bytes of the tables that it returned
        # by pending exchanges of counts: the peak bytes meanwhile, without their tables
        self._peak_by_pending: dict[tuple[str, ...], int] = {}
        self._storages: dict[int, tuple[ref[Tensor], int, int]] = {}  # by id: the tensor, its address, its bytes

    def __enter__(self) -> Ledger:
        self._trace_before, self._wait_counts = sys.gettrace(), self.executor.exchange.wait_counts
        self.executor.exchange.wait_counts = self._wait_counts_and_record  # type: ignore[method-assign]
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._trace_before)
        self.executor.exchange.wait_counts = self._wait_counts  # type: ignore[method-assign]
        for names, size in self._peak_by_pending.items():
            self.peak = max(self.peak, size + sum(self._table_bytes[name] for name in names))

    def write(self, run: Path, rank: int, step: int, program: str, build: str) -> None:
        """Write the ledger into a run folder.

        `build`: digest of the run's copy of its build (runtime/build/run_copy.py).
        """
        path = _path(run, rank)
        path.parent.mkdir(exist_ok=True)
        ledger = {"step": step, "program": program, "of": build, "peak": self.peak, "rows": self.rows}
        write(path, json.dumps(ledger) + "\n")

    def _wait_counts_and_record(self, name: ExchangeName) -> tuple[Route, Tensor, *tuple[Tensor, ...]]:
        route, offsets, *maps = self._wait_counts(name)
        received_rows = (
            (route.num_rows, sum(route.copies), route.forwarded) if isinstance(route, NodeRoute) else route.num_rows
        )
        self.rows[f"{name.site} {name.micro_batch}"] = received_rows
        self._table_bytes[name] = sum(table.nbytes for table in maps)
        return route, offsets, *maps

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if "/stages/" not in frame.f_code.co_filename:
            return None
        self._measure()
        return self._trace

    def _measure(self) -> None:
        storages: dict[int, int] = {}
        route_bytes = 0
        for item in self._live_values():
            if isinstance(item, Route):
                route_bytes += self.route_bytes
                continue
            entry = self._storages.get(id(item))
            if entry is None or entry[0]() is not item:
                entry = self._storages[id(item)] = (ref(item), *self._storage(item))
            _, address, size = entry
            storages[address] = max(storages.get(address, 0), size)
        pending_counts = tuple(name for name in self.executor.exchange.pending if name.kind == "counts")
        total = sum(storages.values()) + route_bytes + len(pending_counts) * (self.route_bytes + self.offsets_bytes)
        self._peak_by_pending[pending_counts] = max(self._peak_by_pending.get(pending_counts, 0), total)

    def _storage(self, tensor: Tensor) -> tuple[int, int]:
        """Return the address and the bytes of a tensor's whole storage.

        Loaded data counts once for each stage that loads it, so its address is replaced by the tensor's id, negated to
        differ from any address.
        """
        address = tensor.data_ptr()
        data = (loaded for loaded in self.executor.batch.data.values() if loaded.nbytes)
        if any(loaded.data_ptr() <= address < loaded.data_ptr() + loaded.nbytes for loaded in data):
            return -id(tensor), tensor.nbytes
        return address, tensor.untyped_storage().nbytes()

    def _live_values(self) -> Iterator[Any]:
        for space in self.executor._values.values():
            yield from (value.flat if isinstance(value, WholeTensors) else value for value in vars(space).values())
        yield from (in_flight.tensors.flat for in_flight in self.executor.sharding.pending.values())
        for rows in (self.executor.tensor_rows, self.executor.sequences, self.executor.choices):
            yield from (in_flight.result for in_flight in rows.pending.values())
        pending: list[Pending] = [*self.executor._posted.values(), *self.executor._sent.values()]
        for name, exchanges in self.executor.exchange.pending.items():
            pending += [] if name.kind == "counts" else exchanges
        yield from (p.result for p in pending)
        yield from self.executor._own_messages.values()
        yield from (value for of_name in self.executor.batch.reported.values() for value in of_name.values())

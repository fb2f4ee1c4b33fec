"""A planned step as Chakra execution traces (MLCommons, arXiv 2305.14516): a file for each rank.

A node is an instruction of the program: a call of a segment, an exchange, a message, a copy to the host or back, and
behind the last action the sums of gradients, the update and the gathering of weights. Starts and durations are those of
`dsc plan`, in whole microseconds: a rank's instructions go in their order over its two lanes, and a step of its
schedule takes what the plan says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache, partial

from compiler.predict.predict import Timed
from compiler.tools.exporters.chakra_nodes import Traced, TraceNode, groups_on
from compiler.tools.exporters.chakra_wire import COLLECTIVES, Values, messages, metadata, node
from compiler.tools.exporters.ledger import Loss
from compiler.tools.exporters.planned import Exported, ExportError

NOTES = (Loss("targets and records", "their sums over all ranks", "the plan counts no time for them: left out", False),)


class Files(Mapping[str, bytes]):
    """The files of all ranks, each made when it is asked for: those of thousands of ranks fill no memory."""

    def __init__(self, traced: Traced) -> None:
        self._traced, self._mesh = traced, traced.plan.mesh
        self._names = {f"{traced.found.spec.name}.{rank}.et": rank for rank in range(self._mesh.world)}
        self._encoded = lru_cache(1)(self._new_encoded)  # files are asked for by pipeline rank
        self._groups = cache(partial(groups_on, traced))

    def __getitem__(self, name: str) -> bytes:
        rank, column = divmod(self._names[name], self._mesh.columns)
        groups = {name: list(of(column)) for name, of in self._groups(rank).items()}
        about = {
            "rank": ("int64_val", self._names[name]),
            "world_size": ("int64_val", self._mesh.world),
            "process_groups": ("string_val", json.dumps(groups)),
        }
        nodes = (
            each if isinstance(each, bytes) else self._message(*each, rank, column) for each in self._encoded(rank)
        )
        return b"".join((metadata(about), *nodes))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _new_encoded(self, rank: int) -> list[bytes | tuple[int, TraceNode]]:
        """The nodes of a pipeline rank as bytes, and those that differ from column to column with their numbers."""
        return [
            (number, each) if each.kind.startswith("COMM_") else _encoded(number, each, each.kind, _values(each))
            for number, each in enumerate(self._traced.rank(rank))
        ]

    def _message(self, number: int, each: TraceNode, rank: int, column: int) -> bytes:
        ends = self._mesh.rank(rank, column), self._mesh.rank(each.peer, column)
        source, target = ends if each.kind == "COMM_SEND" else ends[::-1]
        values: Values = {
            "comm_size": ("int64_val", each.size),
            "comm_src": ("int32_val", source),
            "comm_dst": ("int32_val", target),
            "comm_tag": ("int32_val", each.tag),
        }
        return _encoded(number, each, each.kind, values)


def _values(each: TraceNode) -> Values:
    """What is said of a node that is alike on all columns."""
    if each.kind == "COMP":
        return {"num_ops": ("int64_val", each.flops), "tensor_size": ("uint64_val", each.size)}
    if each.kind in COLLECTIVES:
        return {
            "comm_type": ("int64_val", COLLECTIVES[each.kind]),
            "comm_size": ("int64_val", each.size),
            "pg_name": ("string_val", each.group),
        }
    return {"tensor_size": ("uint64_val", each.size)}


def _encoded(number: int, each: TraceNode, kind: str, values: Values) -> bytes:
    return node(
        number,
        each.name,
        "COMM_COLL" if kind in COLLECTIVES else kind,
        span=(_micros(each.start_ns), _micros(each.end_ns)),
        needs={*each.needs, *each.behind},
        behind=each.behind,
        values={"is_cpu_op": ("bool_val", False), "step": ("int64_val", each.step), **values},
    )


def _micros(time_ns: int) -> int:
    """Whole microseconds. Later stays later, or becomes equal, so that no node overlaps what it waits for."""
    return (time_ns + 500) // 1000


def needs_protobuf() -> None:
    """Raise ExportError where protobuf is not installed, which files are written with."""
    try:
        messages()
    except ModuleNotFoundError:
        raise ExportError("protobuf is not installed", "pip install 'dsc-trainer[chakra]'") from None


def export(found: Timed) -> Exported:
    """The traces of a timed plan, which need protobuf."""
    return Exported(Files(Traced(found)), NOTES)

"""Exports a planned step as Chakra execution traces (MLCommons, arXiv 2305.14516), one file per rank.

A node is an instruction of the program: a segment call, an exchange, a message, a copy to or from the host, and after
the last action the gradient reductions, the update and the all-gather of weights. Starts and durations come from
`dsc plan`, in whole microseconds: a rank runs its instructions in order on two lanes (compute and communication), and
each step of its schedule takes the planned time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from typing import Any

from compiler.predict.timed_plan import TimedPlan
from compiler.tools.exporters.chakra_nodes import ProgramTrace, TraceNode, groups_on
from compiler.tools.exporters.planned import ExportedFiles, ExportError, LostValue

# --- The file format: length-prefixed messages of the MLCommons Chakra 0.0.4 schema
#
# The schema is schema/protobuf/et_def.proto of github.com/mlcommons/chakra, package ChakraProtoMsg; FIELDS has the
# numbers of the fields that are written. A file is a `GlobalMetadata` followed by `Node` messages.

Values = dict[str, tuple[str, Any]]  # attribute name → (protobuf field of the value, value)
VERSION = "0.0.4"
PACKAGE = "ChakraProtoMsg"
# message → field name → (field number, protobuf type or message name, whether repeated)
FIELDS: Mapping[str, Mapping[str, tuple[int, str, bool]]] = {
    "AttributeProto": {
        "name": (1, "string", False),
        "doc_string": (2, "string", False),
        "int32_val": (7, "int32", False),
        "int64_val": (9, "int64", False),
        "uint64_val": (13, "uint64", False),
        "bool_val": (27, "bool", False),
        "string_val": (29, "string", False),
    },
    "GlobalMetadata": {"version": (1, "string", False), "attr": (2, "AttributeProto", True)},
    "Node": {
        "id": (1, "uint64", False),
        "name": (2, "string", False),
        "type": (3, "NodeType", False),
        "ctrl_deps": (4, "uint64", True),
        "data_deps": (5, "uint64", True),
        "start_time_micros": (6, "uint64", False),
        "duration_micros": (7, "uint64", False),
        "attr": (10, "AttributeProto", True),
    },
}
VALUES = ("int32_val", "int64_val", "uint64_val", "bool_val", "string_val")  # members of a `oneof`
NODES = {"MEM_LOAD": 2, "MEM_STORE": 3, "COMP": 4, "COMM_SEND": 5, "COMM_RECV": 6, "COMM_COLL": 7}
COLLECTIVES = {"ALL_REDUCE": 0, "ALL_GATHER": 2, "ALL_TO_ALL": 6, "REDUCE_SCATTER": 7}


@cache
def messages() -> Mapping[str, Any]:
    """The class of each message. Raises ModuleNotFoundError if protobuf is not installed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="dsc/et_def.proto", package=PACKAGE, syntax="proto3")
    values = file.enum_type.add(name="NodeType")
    for name, number in {"INVALID": 0, "METADATA": 1, **NODES}.items():
        values.value.add(name=f"{name}_NODE", number=number)
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for field, (number, kind, repeated) in fields.items():
            added = message.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in FIELDS or kind == "NodeType":
                added.type = kinds.TYPE_MESSAGE if kind in FIELDS else kinds.TYPE_ENUM
                added.type_name = f".{PACKAGE}.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
            if field in VALUES:
                added.oneof_index = 0
    pool = (
        descriptor_pool.DescriptorPool()
    )  # not the default pool, where another package may have registered the full schema
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in FIELDS}


def attributes(values: Values) -> list[Any]:
    """The attributes of a node or a file."""
    kind = messages()["AttributeProto"]
    return [kind(name=name, **{field: value}) for name, (field, value) in values.items()]


def frame_message(message: Any) -> bytes:
    """A serialized message, prefixed with its length as a varint."""
    content: bytes = message.SerializeToString(deterministic=True)
    length, head = len(content), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + content


def metadata(values: Values) -> bytes:
    """The first message of a file."""
    return frame_message(messages()["GlobalMetadata"](version=VERSION, attr=attributes(values)))


def node(
    number: int,
    name: str,
    kind: str,
    *,
    span: tuple[int, int],
    needs: Iterable[int],
    behind: Iterable[int],
    values: Values,
) -> bytes:
    """A serialized node.

    `span`: start and end in microseconds; `needs`: numbers of all nodes that it waits for; `behind`: those of `needs`
    that it waits for only because a lane runs one node at a time.
    """
    start, end = span
    return frame_message(
        messages()["Node"](
            id=number,
            name=name,
            type=NODES[kind],
            ctrl_deps=sorted(behind),
            data_deps=sorted(needs),
            start_time_micros=start,
            duration_micros=end - start,
            attr=attributes(values),
        )
    )


# --- The files

NOTES = (
    LostValue("targets and records", "their sums over all ranks", "left out: the plan assigns them no time", False),
)


class TraceFiles(Mapping[str, bytes]):
    """The files of all ranks, each built when it is read, so that thousands of ranks do not fill the memory."""

    def __init__(self, traced: ProgramTrace) -> None:
        self._traced, self._mesh = traced, traced.plan.mesh
        self._names = {f"{traced.timed.spec.name}.{rank}.et": rank for rank in range(self._mesh.world)}
        self._nodes_of_rank = lru_cache(1)(self._encode_rank)  # files are read in the order of pipeline ranks
        self._groups = cache(partial(groups_on, traced))

    def __getitem__(self, name: str) -> bytes:
        rank, column = self._mesh.coordinates(self._names[name])
        groups = {name: list(ranks_at(column)) for name, ranks_at in self._groups(rank).items()}
        header = {
            "rank": ("int64_val", self._names[name]),
            "world_size": ("int64_val", self._mesh.world),
            "process_groups": ("string_val", json.dumps(groups)),
        }
        nodes = (
            entry if isinstance(entry, bytes) else self._message(*entry, rank, column)
            for entry in self._nodes_of_rank(rank)
        )
        return b"".join((metadata(header), *nodes))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _encode_rank(self, rank: int) -> list[bytes | tuple[int, TraceNode]]:
        """The nodes of a pipeline rank: as bytes, or as (number, node) for messages, which differ between columns."""
        return [
            (number, trace_node)
            if trace_node.kind.startswith("COMM_")
            else _encode_node(number, trace_node, trace_node.kind, _values(trace_node))
            for number, trace_node in enumerate(self._traced.rank(rank))
        ]

    def _message(self, number: int, trace_node: TraceNode, rank: int, column: int) -> bytes:
        ends = self._mesh.rank(rank, column), self._mesh.rank(trace_node.peer, column)
        source, target = ends if trace_node.kind == "COMM_SEND" else ends[::-1]
        values: Values = {
            "comm_size": ("int64_val", trace_node.size),
            "comm_src": ("int32_val", source),
            "comm_dst": ("int32_val", target),
            "comm_tag": ("int32_val", trace_node.tag),
        }
        return _encode_node(number, trace_node, trace_node.kind, values)


def _values(trace_node: TraceNode) -> Values:
    """The attributes of a node that is the same on all columns."""
    if trace_node.kind == "COMP":
        return {"num_ops": ("int64_val", trace_node.flops), "tensor_size": ("uint64_val", trace_node.size)}
    if trace_node.kind in COLLECTIVES:
        return {
            "comm_type": ("int64_val", COLLECTIVES[trace_node.kind]),
            "comm_size": ("int64_val", trace_node.size),
            "pg_name": ("string_val", trace_node.group),
        }
    return {"tensor_size": ("uint64_val", trace_node.size)}


def _encode_node(number: int, trace_node: TraceNode, kind: str, values: Values) -> bytes:
    return node(
        number,
        trace_node.name,
        "COMM_COLL" if kind in COLLECTIVES else kind,
        span=(_micros(trace_node.start_ns), _micros(trace_node.end_ns)),
        needs={*trace_node.needs, *trace_node.behind},
        behind=trace_node.behind,
        values={"is_cpu_op": ("bool_val", False), "step": ("int64_val", trace_node.step), **values},
    )


def _micros(time_ns: int) -> int:
    """Whole microseconds. Rounding keeps the order, so no node overlaps one that it waits for."""
    return (time_ns + 500) // 1000


def needs_protobuf() -> None:
    """Raise ExportError if protobuf, which writes the files, is not installed."""
    try:
        messages()
    except ModuleNotFoundError:
        raise ExportError("protobuf is not installed", "pip install 'dsc-trainer[chakra]'") from None


def export(timed: TimedPlan) -> ExportedFiles:
    """The traces of a timed plan. Reading a file needs protobuf."""
    return ExportedFiles(TraceFiles(ProgramTrace(timed)), NOTES)

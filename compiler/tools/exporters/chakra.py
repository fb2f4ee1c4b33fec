"""A planned step as Chakra execution traces (MLCommons, arXiv 2305.14516): a file for each rank.

A node is an instruction of the program: a call of a segment, an exchange, a message, a copy to the host or back, and
behind the last action the sums of gradients, the update and the gathering of weights. Starts and durations are those of
`dsc plan`, in whole microseconds: a rank's instructions go in their order over its two lanes, and a step of its
schedule takes what the plan says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from typing import Any

from compiler.predict.predict import TimedPlan
from compiler.tools.exporters.chakra_nodes import Traced, TraceNode, groups_on
from compiler.tools.exporters.planned import Exported, ExportError, LostValue

# --- Chakra execution traces on the wire: messages of the schema of MLCommons Chakra 0.0.4, each behind its length
#
# The schema is schema/protobuf/et_def.proto of github.com/mlcommons/chakra, package ChakraProtoMsg; here are the fields
# that are written, by their numbers. A file is a `GlobalMetadata` and then a `Node` after another.

Values = dict[str, tuple[str, Any]]  # of attributes: name → (field of the value, value)
VERSION = "0.0.4"
PACKAGE = "ChakraProtoMsg"
# message → its fields: name → (number, type; a name of a message, or of a type of protobuf; whether it is repeated)
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
VALUES = ("int32_val", "int64_val", "uint64_val", "bool_val", "string_val")  # of a `oneof`: an attribute has one
NODES = {"MEM_LOAD": 2, "MEM_STORE": 3, "COMP": 4, "COMM_SEND": 5, "COMM_RECV": 6, "COMM_COLL": 7}
COLLECTIVES = {"ALL_REDUCE": 0, "ALL_GATHER": 2, "ALL_TO_ALL": 6, "REDUCE_SCATTER": 7}


@cache
def messages() -> Mapping[str, Any]:
    """The class of each message. ModuleNotFoundError where protobuf is not installed."""
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
    pool = descriptor_pool.DescriptorPool()  # one of its own: another package may have the whole schema in the default
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in FIELDS}


def attributes(values: Values) -> list[Any]:
    """The attributes of a node or a file."""
    kind = messages()["AttributeProto"]
    return [kind(name=name, **{field: value}) for name, (field, value) in values.items()]


def framed(message: Any) -> bytes:
    """The bytes of a message behind their number, a varint."""
    content: bytes = message.SerializeToString(deterministic=True)
    length, head = len(content), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + content


def metadata(values: Values) -> bytes:
    """The first message of a file."""
    return framed(messages()["GlobalMetadata"](version=VERSION, attr=attributes(values)))


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
    """A node of a file. `span`: its start and end in microseconds; `needs`: all that it waits for; `behind`: what of
    that is before it only because a lane does one thing at a time."""
    start, end = span
    return framed(
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


# --- chakra

NOTES = (
    LostValue("targets and records", "their sums over all ranks", "the plan counts no time for them: left out", False),
)


class TraceFiles(Mapping[str, bytes]):
    """The files of all ranks, each made when it is asked for: those of thousands of ranks fill no memory."""

    def __init__(self, traced: Traced) -> None:
        self._traced, self._mesh = traced, traced.plan.mesh
        self._names = {f"{traced.found.spec.name}.{rank}.et": rank for rank in range(self._mesh.world)}
        self._encoded = lru_cache(1)(self._new_encoded)  # files are asked for by pipeline rank
        self._groups = cache(partial(groups_on, traced))

    def __getitem__(self, name: str) -> bytes:
        rank, column = self._mesh.coordinates(self._names[name])
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


def export(found: TimedPlan) -> Exported:
    """The traces of a timed plan, which need protobuf."""
    return Exported(TraceFiles(Traced(found)), NOTES)

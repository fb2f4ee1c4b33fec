"""Rate tables: JSON files of measured or published rates, each with its source, date and SM count.

    {"name": "h800", "base": null,
     "device": {"name": "NVIDIA H800", "sms": 132, "bf16": 989e12, "fp8": 1979e12, "hbm": 3.35e12, …},
     "rows": [{"class": "gemm", "dtype": "e4m3", "shape": [4096, 2112, 7168], "rate": 1.127e15, "sms": 132,
               "when": "lone", "source": "DeepGEMM …", "date": "2025-04"}, …],
     "factors": []}

docs/rates.md says what each key means. A table inherits the rows of its base, except for classes and dtypes for which
it has rows, and the peaks of the base's device, except for those that it states.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from math import log2
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from compiler.files import text as textfile
from dsl.messages.diagnostics import is_hidden
from dsl.schema import StrictModel
from dsl.schema.kernels import LIBRARY_NAMES
from dsl.schema.stack import TRANSPORTS

# --- Kernel classes: the units of their rates, and the classes that stand in for a class without rows. The class of an
# op comes from its rule (`compiler.model.ops`)
#
# A rate depends on the class, the dtype and the shape of a kernel. The shape is
#
#     products            (m, n, k): m rows and n columns, summed over k; dgrad and wgrad in their own extents
#     grouped products    (groups, m, n, k): m, or k of weight gradients, is the mean of the groups
#     attention           (tokens, sequence, heads, width of a key, width of a value); the same for the delta rule
#     all others          (rows, columns) of the largest tensor that is read or written

SEQUENCES = ("attention", "attention_backward", "delta_rule", "delta_rule_backward")  # work on whole sequences
GROUPED = ("grouped_gemm", "grouped_wgrad")  # products of several groups of rows
FLOPS = ("gemm", "grouped_gemm", "wgrad", "grouped_wgrad", *SEQUENCES)  # rates in FLOP/s
MEMORY = (
    *("rope", "norm", "swiglu", "add", "permute", "quantise", "cast", "cross_entropy", "router", "embedding", "copy"),
)
LEVELS = ("node", "network")
LINKS = (  # rates in byte/s; shape (ranks, bytes a rank sends)
    *("dispatch_node", "combine_node", "dispatch_network", "combine_network"),
    *("message_node", "message_network", "all_reduce_node", "all_reduce_network"),
)
EXCHANGES = LINKS[:4]  # of rows, between expert ranks
HOST = "host"  # copies between an accelerator and pinned host memory, byte/s per direction
BYTES = (*MEMORY, *LINKS, "optimizer", HOST)
LAUNCH = "launch"
# Rows in seconds: a launch, the latencies of transfers, and the time until a host has read numbers from its device.
SECONDS = (
    LAUNCH,
    "exchange_node",
    "exchange_network",
    "latency_node",
    "latency_network",
    "host_read_node",
    "host_read_network",
)
PAIR = "pair"  # only for factors: how much longer two overlapped micro-batches take than their two lanes
CLASSES = (*FLOPS, *BYTES, *SECONDS)
# If a class has no rows, those of the first class in its list that has some.
INSTEAD = {
    "wgrad": ("gemm",),
    "grouped_gemm": ("gemm",),
    "grouped_wgrad": ("wgrad", "grouped_gemm", "gemm"),
    "attention_backward": ("attention",),
    "delta_rule": ("attention",),
    "delta_rule_backward": ("delta_rule", "attention_backward", "attention"),
    **{kind: ("copy",) for kind in (*MEMORY, "optimizer") if kind != "copy"},
    "combine_node": ("dispatch_node",),
    "combine_network": ("dispatch_network",),
    "message_network": ("message_node",),
    "message_node": ("message_network",),
    "all_reduce_node": ("message_node", "message_network"),
    "all_reduce_network": ("message_network", "all_reduce_node", "message_node"),
    "latency_network": ("latency_node",),
    "latency_node": ("latency_network",),
    "host_read_network": ("host_read_node",),
    "exchange_network": ("latency_network",),
    "exchange_node": ("latency_node",),
}


def shape_at(shape: Sequence[int | str], rows: int) -> tuple[int, ...]:
    """A shape with `rows` received rows for "R"; a grouped product spreads them evenly over its groups."""
    groups = shape[0] if len(shape) == 4 else 1
    assert isinstance(groups, int)
    return tuple(max(1, rows // groups) if extent == "R" else int(extent) for extent in shape)


# --- The rate of a shape without a row: a mean of the rows of its class, weighted by distance
#
# Distances are between logarithms: a matrix with half the rows is as far away as one with twice as many. A shape that
# has a row gets the rate of that row. For transfers see compiler/machine/topology/fabric.py.

Point = tuple[tuple[int, ...], float]  # shape, rate


def rate_at(points: Sequence[Point], shape: tuple[int, ...]) -> float:
    """The rate of a shape. `points` is not empty; a point without a shape counts as a factor 2 away from any shape."""
    near: list[tuple[float, float]] = []
    for extents, rate in points:
        square = sum(log2(a / b) ** 2 for a, b in zip(extents, shape, strict=True)) if extents and shape else 1.0
        if square == 0:
            return rate
        near.append((1 / square**2, rate))  # many rows far away weigh less than one nearby
    # A harmonic mean of rates averages the times of equal work, so a fast row does not hide a slow one.
    return sum(weight for weight, _ in near) / sum(weight / rate for weight, rate in near)


# --- table

TABLES = Path(__file__).parent / "tables"
MAX_BYTES = 8 << 20
MAX_ROWS = 5_000  # lookups in them take about a second; a spec of 61 layers has about 100 shapes
MAX_TEXT = 500
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3
# Peaks of wider floats over the BF16 peak, H100 data sheet: TF32 495 and FP64 67 of 989 TFLOPS.
OVER_BF16 = {"bf16": 1.0, "fp32": 0.5, "fp64": 0.068, "any": 1.0}


def printable(text: str) -> str:
    """Return the text. Raises ValueError if it has characters that could control a terminal."""
    if any(map(is_hidden, text)):
        raise ValueError("it has characters that cannot be printed")
    return text


Extent = Annotated[int, Field(ge=1, le=2**62)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(printable)]
Peak = Annotated[float, Field(ge=1, le=1e21, allow_inf_nan=False)]
Date = Annotated[str, Field(pattern=r"^[0-9]{4}(-[0-9]{2}){0,2}$")]
Model = TypeVar("Model", bound=BaseModel)
Dtype = Literal["e2m1", "e4m3", "bf16", "fp32", "fp64", "any"]


class RateError(ValueError):
    """A rate table or trace that cannot be used. The message is for its author."""


class TableModel(StrictModel):
    """Base of every object in a table or trace: strict types, and no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class MeasuredDevice(TableModel):
    """The device of a measurement. Peaks are dense FLOP/s, and byte/s per direction.

    Rates are scaled by the ratio of a spec's peaks to these.
    """

    name: Text
    sms: Annotated[int, Field(ge=1, le=4096)] | None = None
    cores: Annotated[int, Field(ge=1, le=65536)] | None = None  # of a CPU: those that ranks can run on
    bf16: Peak | None = None
    fp8: Peak | None = None
    fp4: Peak | None = None
    hbm: Peak | None = None
    nvlink: Peak | None = None
    nic: Peak | None = None


class RateRow(TableModel):
    """A measured rate: `rate` in FLOP/s or byte/s, depending on the class, or `seconds` for a class in seconds."""

    kind: Annotated[str, Field(alias="class")]
    dtype: Dtype = "any"
    shape: Annotated[tuple[Extent, ...], Field(max_length=5)] = ()
    rate: Annotated[float, Field(ge=1, le=1e21, allow_inf_nan=False)] | None = None
    seconds: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] | None = None
    sms: Annotated[int, Field(ge=1, le=4096)] | None = None  # that the kernel ran on; None: all
    when: Literal["lone", "paired"] = "lone"  # paired: beside communication or, on a CPU, beside other ranks
    by: str | None = None  # library that was measured, as a run names it; None: kernels of dsc
    scaled_from: Text | None = None  # the measured device, if the rate is as large a share of another device's peak
    source: Text
    date: Date

    @model_validator(mode="after")
    def _consistent(self) -> RateRow:
        if self.kind not in CLASSES:
            close = get_close_matches(self.kind, CLASSES, n=1) or [", ".join(CLASSES)]
            raise ValueError(f"there is no class {self.kind[:40]!r}: use {close[0]}")
        if (self.rate is None) != (self.kind in SECONDS) or (self.seconds is None) == (self.kind in SECONDS):
            needed, excluded = ("seconds", "rate") if self.kind in SECONDS else ("rate", "seconds")
            raise ValueError(f"a row of class {self.kind} has `{needed}`, not `{excluded}`")
        named = LIBRARY_NAMES if self.kind in FLOPS else TRANSPORTS if self.kind in EXCHANGES else ()
        if self.by is not None and self.by not in named:
            choice = f"one of {', '.join(named)}" if named else "`by` only with products, attention and exchanges"
            raise ValueError(f"{self.by[:40]!r} does not run {self.kind}: use {choice}")
        extents = _extents(self.kind)
        if len(self.shape) not in extents:
            raise ValueError(f"the shape of class {self.kind} has {' or '.join(map(str, extents))} extents")
        return self


class Factor(TableModel):
    """How much longer a class takes than its rows say, measured while its kernels run beside others in training."""

    kind: Annotated[str, Field(alias="class")]
    dtype: Dtype = "any"  # of the measured kernels; other dtypes have other kernels
    factor: Annotated[float, Field(ge=LEAST_FACTOR, le=MOST_FACTOR, allow_inf_nan=False)]
    carried: bool = False  # from another device: its uncertainty is its size
    by_host: bool = False  # what the host's call of an exchange costs beside its kernels; none in a CUDA graph
    source: Text
    date: Date

    @model_validator(mode="after")
    def _consistent(self) -> Factor:
        if self.kind != PAIR and (self.kind not in CLASSES or self.kind in SECONDS):
            raise ValueError(f"{self.kind[:40]!r} is not a class with a rate")
        return self


class RateTable(TableModel):
    """A whole rate table. `read_table` and `shipped_table` merge it with its base, if it has one."""

    name: Text
    base: str | None = None
    # whether tiles and waves give the rates of other shapes, for 16 bits and more (compiler/machine/rates/rates.py)
    tiles: bool = False
    device: MeasuredDevice
    rows: Annotated[tuple[RateRow, ...], Field(max_length=MAX_ROWS)] = ()
    factors: Annotated[tuple[Factor, ...], Field(max_length=2 * len(CLASSES))] = ()

    @model_validator(mode="after")
    def _consistent(self) -> RateTable:
        kinds = [(factor.kind, factor.dtype) for factor in self.factors]
        if len(set(kinds)) < len(kinds):
            raise ValueError("a class has two factors in one dtype")
        if self.base is not None and self.base not in shipped_table_names():
            raise ValueError(f"there is no table {self.base[:40]!r}: use one of {', '.join(shipped_table_names())}")
        return self

    def factor_of(self, kind: str, dtype: str = "any") -> float:
        """The factor of a class in a dtype; 1 if the table has none."""
        by_dtype: dict[str, float] = {factor.dtype: factor.factor for factor in self.factors if factor.kind == kind}
        return by_dtype.get(dtype, by_dtype.get("any", 1.0))

    def to_json(self) -> str:
        """The JSON text of the table, with one row per line for readable diffs."""
        head: dict[str, object] = {"name": self.name, "base": self.base} if self.base else {"name": self.name}
        head |= {"tiles": True} if self.tiles else {}
        head["device"] = self.device.model_dump(exclude_none=True)
        lines = [f"  {json.dumps(key)}: {_text(value)}" for key, value in head.items()]
        lines += [f'  "rows": {_list_text(self.rows)}', f'  "factors": {_list_text(self.factors)}']
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _list_text(entries: Iterable[RateRow | Factor]) -> str:
    dumped = [_entry_fields(entry) for entry in entries]
    lines = [f"    {_text(fields)}" for fields in dumped]
    return "[\n" + ",\n".join(lines) + "\n  ]" if lines else "[]"


def _entry_fields(entry: RateRow | Factor) -> dict[str, object]:
    dumped: dict[str, object] = entry.model_dump(by_alias=True, exclude_none=True, mode="json")
    return {key: value for key, value in dumped.items() if value is not False}


def _text(value: object) -> str:
    """JSON that writes 1127000000000000.0 as 1.127e15."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"(?<=: )[0-9]{7,}\.0(?=[,}])", lambda match: f"{float(match[0]):.6g}".replace("e+", "e"), text)


def _extents(kind: str) -> tuple[int, ...]:
    if kind in SECONDS:
        return (0,)
    if kind in LINKS:
        return 0, 2
    if kind in FLOPS:
        return 0, 5 if kind in SEQUENCES else 4 if kind in GROUPED else 3
    return 0, 2


# ---------------------------------------------------------------- files
def shipped_table_names() -> tuple[str, ...]:
    """The names of the tables that come with dsc."""
    return tuple(sorted(path.stem for path in TABLES.glob("*.json")))


@cache
def shipped_table(name: str) -> RateTable:
    """A shipped table, with its base."""
    return read_table(TABLES / f"{name}.json")


def read_table(path: Path, display_name: str = "") -> RateTable:
    """Read a table and merge it with its base. `display_name` names the file in messages.

    Raises RateError, which names the file and the key.
    """
    return table_of_json(read_text(path, display_name), display_name or str(path))


def read_text(path: Path, display_name: str = "") -> str:
    """The text of a JSON file that a user names. Raises RateError if it cannot be read."""
    try:
        return textfile.read_text(path, MAX_BYTES, display_name)
    except textfile.TextFileError as error:
        raise RateError(str(error)) from None


def table_of_json(text: str, display_name: str) -> RateTable:
    """Parse a table and merge it with its base. `display_name` names the file in messages."""
    return merge_base(parse_model(RateTable, text, display_name))


def merge_base(table: RateTable) -> RateTable:
    """The table merged with its base, if it has one."""
    if table.base is None:
        return table
    base = shipped_table(table.base)
    stated = {(row.kind, row.dtype, row.by) for row in table.rows}
    device = _inherit_facts(table.device, base.device)
    unstated = (row for row in base.rows if (row.kind, row.dtype, row.by) not in stated)
    inherited = (_scale_row(row, base.device, device) for row in unstated)
    rows = (*table.rows, *inherited)
    scaled = {(factor.kind, factor.dtype) for factor in table.factors}
    factors = (*table.factors, *(factor for factor in base.factors if (factor.kind, factor.dtype) not in scaled))
    return table.model_copy(update={"base": None, "device": device, "rows": rows, "factors": factors})


def _inherit_facts(device: MeasuredDevice, base: MeasuredDevice) -> MeasuredDevice:
    """The device with missing facts from its base. If it states `bf16`, it does not inherit `fp8` and `fp4`."""
    inherited = base.model_copy(update={"fp8": None, "fp4": None}) if device.bf16 else base
    return inherited.model_copy(update=device.model_dump(exclude_none=True))


def peak_of(device: MeasuredDevice, kind: str, dtype: str) -> float | None:
    """The peak with which the rates of a class scale; None if the device does not state it."""
    if kind in FLOPS:
        if device.bf16 is None:
            return None
        if dtype in ("e4m3", "e2m1"):
            return (device.fp4 if dtype == "e2m1" else device.fp8) or device.fp8 or device.bf16
        return device.bf16 * OVER_BF16[dtype]
    if kind == HOST:
        return None  # a spec has no key for it
    if kind in LINKS:
        inside, between = device.nvlink or device.nic, device.nic or device.nvlink
        return inside if kind.endswith("_node") else between
    return device.hbm


def scale(kind: str, dtype: str, measured: MeasuredDevice, device: MeasuredDevice) -> float:
    """How much faster a class is on `device` than on `measured`, by their peaks; 1 if these are unknown."""
    peaks = peak_of(device, kind, dtype), peak_of(measured, kind, dtype)
    return peaks[0] / peaks[1] if peaks[0] and peaks[1] else 1.0


def _scale_row(row: RateRow, measured: MeasuredDevice, device: MeasuredDevice) -> RateRow:
    """A row of a base, scaled to a table's own peaks and to the same share of its SMs."""
    share = device.sms / measured.sms if device.sms and measured.sms else 1.0
    sms = row.sms and max(1, round(row.sms * share))
    factor = scale(row.kind, row.dtype, measured, device)
    rate = row.rate and row.rate * factor
    scaled_from = row.scaled_from or (measured.name if rate and factor != 1 else None)
    return row.model_copy(update={"rate": rate, "sms": sms, "scaled_from": scaled_from})


def parse_model(model: type[Model], text: str, display_name: str) -> Model:
    """Parse a JSON text. Raises RateError with file and line if it is not JSON, or with the key that is wrong."""
    try:
        textfile.json_of(text, display_name)
        return model.model_validate_json(text)
    except textfile.TextFileError as error:
        raise RateError(str(error)) from None
    except ValidationError as error:
        first, *rest = error.errors(include_url=False, include_input=False)
        suffix = f" (and {len(rest)} more)" if rest else ""
        raise RateError(f"{display_name}: {_key(first['loc'])}{_sentence(first['msg'])}{suffix}") from None


def _key(location: tuple[str | int, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:40]}" for part in location).lstrip(".")
    return f"{text}: " if text else ""


def _sentence(message: str) -> str:
    message = message.removeprefix("Value error, ").replace("Tuple should", "The list should")
    message = message.replace(" after validation", "")
    return message[:1].lower() + message[1:]

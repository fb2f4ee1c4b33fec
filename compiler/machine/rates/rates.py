"""What a spec's devices achieve: op → seconds of compute; and the fabric of its cluster, which prices transfers.

The rows come from a rate table (compiler/machine/rates/tables, or a file of `dsc calibrate`). None was fitted to a
training step. docs/rates.md says how a rate is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import ceil

from compiler.ir import Cost
from compiler.ir.dtypes import is_packed
from compiler.machine.rates.table import FLOPS, HOST, Point, rate_at, shape_at
from compiler.machine.topology import ExpertTraffic, Fabric
from compiler.model.ops import kernel_class

# --- How well products and attention of a shape fill a device: the share of its rate that tiles and waves leave
#
# A product is cut into tiles, of which each SM computes one at a time; all that run at once are a wave. What lies
# beyond the edges of a matrix is computed in vain, and in the last wave SMs are idle (NVIDIA, Matrix Multiplication
# Background, DU-09799-001, sections 2 and 3). Where tiles are few, the sum is split among SMs. The first part of a sum
# waits for its operands, as nothing is loaded ahead of it. So a rate that was measured at one shape says what full
# tiles reach, and that says the rates of other shapes. Products of 8 bits have rows of many shapes, and kernels with
# tiles of their own.

TILES = ((256, 128), (128, 256), (128, 128))  # the fastest of cuBLAS, the same guide, section 2.3; the best is taken
SPLITS = (1, 2, 4, 8)  # of the sum: the powers of two that cuBLAS and CUTLASS are asked for
STEP = 64  # of the sum: what is loaded at a time, CUTLASS's default for 16 bits
BLOCK = 128  # rows and columns of attention that are computed together: FlashAttention-2 and 3


@cache
def filled(kind: str, dtype: str, shape: tuple[int, ...], sms: int | None) -> float:
    """The share, above 0 and at most 1, of the rate of full tiles that a kernel of this shape reaches on so many SMs.

    1 where the shape or the number of SMs is not known, for classes that are bound by memory, and for 8 bits and less.
    """
    if kind not in FLOPS or not shape or sms is None or dtype in ("e4m3", "e2m1"):
        return 1.0
    if kind.startswith("attention"):
        sequence = shape[1]
        return sequence / (sequence + BLOCK)  # blocks on the diagonal are computed whole
    groups, m, n, k = shape if len(shape) == 4 else (1, *shape)
    return max(_of_tiles(groups * split, m, n, k / split, tile, sms) for tile in TILES for split in SPLITS)


def _of_tiles(groups: int, m: int, n: int, k: float, tile: tuple[int, int], sms: int) -> float:
    tiles = groups * ceil(m / tile[0]) * ceil(n / tile[1])
    return groups * m * n / (ceil(tiles / sms) * sms * tile[0] * tile[1]) * k / (k + STEP)


# --- rates


@dataclass(frozen=True)
class Rates:
    """Achieved rates of one spec: those of a table, at its devices' peaks and for the SMs it gives to each side.

    `linear` is the dtype of products of linears, `plain` that of all others. Transfers are asked of `fabric`, which has
    the rows of links of every kind of node; `points` says of these, too, how well they are known.
    """

    points: Mapping[
        tuple[str, str], tuple[Point, ...]
    ]  # by class and dtype: of full tiles, with the factors of classes
    fabric: Fabric  # of the whole cluster: prices messages, reductions and exchanges
    experts: ExpertTraffic  # whom one of these devices exchanges rows with
    launch_s: float = 0.0  # between two kernels of a stream, or of calling one function of torch
    host_read_s: float = 0.0  # from where counts are on a device to where its host goes on with them
    linear: str = "fp32"
    plain: str = "fp32"
    cores: int | None = None  # CPU cores that the ranks of a node share; None: each rank has a device of its own
    ranks_of_node: int = 1
    sms: int | None = None  # over which tiles are spread; None: shapes are not told apart by tiles
    compute: float = 1.0  # share of the SMs that products have at the rates of `points`
    left: float = 1.0  # share of the SMs that an exchange leaves to what is computed beside it
    keeps: bool = False  # whether products keep to it in all that their action computes: kernels are made for it
    carried: Mapping[str, float] = field(default_factory=dict)  # by class: factors that were measured on another device
    rope: bool = False  # whether attention's rates are of its core alone, without RoPE and the assembly of keys
    pair: float = 1.0  # how much longer two overlapped actions take than their lanes
    table: str = ""
    calibrated: bool = True  # False where a core of another CPU stands in for those of the spec
    sharing: Mapping[str, Sequence[int]] = field(default_factory=dict)  # by mesh axis: whom it splits rows with
    assumptions: tuple[str, ...] = ()  # of what the table does not say of the device
    notes: Mapping[tuple[str, str], str] = field(default_factory=dict, compare=False)  # what stands in for no rows
    _rates_at: dict[tuple[str, str, tuple[int, ...]], float] = field(default_factory=dict, compare=False, repr=False)
    _calls: dict[tuple[str, int, int], tuple[Cost, float]] = field(default_factory=dict, compare=False, repr=False)

    # ------------------------------------------------------------ compute

    @cached_property
    def undivided(self) -> Rates:
        """Rates where nothing is exchanged: products have all SMs."""
        return self._on(1.0)

    @cached_property
    def beside(self) -> Rates:
        """Rates beside an exchange: products have the SMs that it leaves."""
        return self._on(self.left)

    def _on(self, share: float) -> Rates:
        """These rates with products on a share of the SMs."""
        if share == self.compute:
            return self
        points = {
            (kind, dtype): tuple((shape, rate * share / self.compute) for shape, rate in each)
            if kind in FLOPS
            else each
            for (kind, dtype), each in self.points.items()
        }
        return replace(self, points=points, compute=share, _rates_at={}, _calls={})

    def compute_s(self, kind: str, cost: Cost, rows: int) -> float:
        """Seconds of one call of a segment of `kind` that meets `rows` received rows: its ops one after the other."""
        priced = self._calls.get((kind, id(cost), rows))
        if priced is None or priced[0] is not cost:  # costs are large to hash, and one is asked for often
            time_s = sum(self.launch_s + self.kernel_s(kind, op, work, rows) for op, work in cost.ops)
            self._calls[kind, id(cost), rows] = priced = (cost, time_s)
        return priced[1]

    def kernel_s(self, kind: str, op: str, work: Cost, rows: int) -> float:
        """Seconds that an op of a segment of `kind` computes, without its launch."""
        return sum(time_s for _, time_s in self.kernels_s(kind, op, work, rows))

    def kernels_s(self, kind: str, op: str, work: Cost, rows: int) -> tuple[tuple[str, float], ...]:
        """Class and seconds of each kernel of an op: one, but for attention where RoPE is a pass before its core."""
        of = kernel_class(op)
        shape = shape_at(work.shape, rows)
        moved_bytes = work.bytes + work.bytes_row * rows
        if of not in FLOPS:
            return ((of, moved_bytes / self.rate(of, "any", shape)),)
        flops = work.flops + work.flops_row * rows
        core = max(flops / self.rate(of, self.dtype_of(kind, op, work), shape), moved_bytes / self.memory_bytes)
        if self.rope and of.startswith("attention"):
            return (of, core), ("rope", moved_bytes / self.rate("rope", "any", ()))
        return ((of, core),)

    def dtype_of(self, kind: str, op: str, work: Cost) -> str:
        """The dtype of a product; neither gate nor head is in FP8 (arXiv 2412.19437 §3.3), nor are layers kept high."""
        if "linear" not in op or kind in ("router", "head"):
            return self.plain
        high = self.linear in ("e4m3", "e2m1") and work.dtype and not is_packed(work.dtype)
        return self.plain if high else self.linear

    def rate(self, kind: str, dtype: str, shape: tuple[int, ...]) -> float:
        """FLOP/s or byte/s of a class at a shape."""
        key = (kind, dtype, shape)
        if key not in self._rates_at:
            self._rates_at[key] = rate_at(self.points[kind, dtype], shape) * filled(kind, dtype, shape, self.sms)
        return self._rates_at[key]

    @property
    def memory_bytes(self) -> float:
        """Byte/s of a copy of a large tensor, read and written."""
        return self.rate("copy", "any", ())

    def optimizer_time_s(self, moved_bytes: float) -> float:
        """Seconds of an optimizer that reads and writes so many bytes of weights, gradients and state."""
        return moved_bytes / self.rate("optimizer", "any", ())

    def host_time_s(self, moved_bytes: float) -> float:
        """Seconds in which so many bytes go from the memory of the host to the device, or back: for cores, a copy."""
        return moved_bytes / self.rate(HOST, "any", ())

    def product_time_s(self, flops: float) -> float:
        """Seconds of so many FLOPs of large matrix products, in the dtype of `compute`."""
        return flops / self.rate("gemm", self.plain, ()) if flops else 0.0

    def shared_s(self, makespan_s: float, busy_s: Iterable[float]) -> float:
        """A makespan where the ranks of a node share cores: no shorter than their work over the cores.

        `busy_s`: of each rank of a node, what it computes and copies. Between this and a device of its own for each
        rank, a rank that waits leaves its core to another.
        """
        if self.cores is None or self.cores >= self.ranks_of_node:
            return makespan_s
        return max(makespan_s, sum(busy_s) / self.cores)

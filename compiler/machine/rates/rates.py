"""Achieved rates of a spec's devices: seconds of compute for each op, and the fabric that prices its transfers.

The rates come from a rate table (compiler/machine/rates/tables, or a file of `dsc calibrate`). No row was fitted to a
training step. docs/rates.md says how a rate is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import ceil

from compiler.ir import Cost, TorchWork
from compiler.ir.dtypes import is_packed
from compiler.machine.rates.table import FLOPS, HOST, Point, rate_at, shape_at
from compiler.machine.topology import ExpertTraffic, Fabric
from compiler.model.ops import kernel_class

# --- How well products and attention of a shape fill a device: the share of its rate that tiles and waves leave
#
# A product is cut into tiles, and each SM computes one at a time; the tiles that run together are a wave. Work beyond
# the edges of a matrix is wasted, and in the last wave some SMs are idle (NVIDIA, Matrix Multiplication Background,
# DU-09799-001, sections 2 and 3). If there are few tiles, the sum over k is split among SMs. The first step of a sum
# waits for its operands, as nothing is loaded ahead of it. So a rate that was measured at one shape implies the rate of
# full tiles, and with it the rates of other shapes. FP8 products are not treated this way: they have rows of many
# shapes, and kernels with other tiles.

TILES = ((256, 128), (128, 256), (128, 128))  # the fastest of cuBLAS (same guide, section 2.3); the best one counts
SPLITS = (1, 2, 4, 8)  # of the sum over k: the powers of two that cuBLAS and CUTLASS offer
STEP = 64  # elements of k that are loaded at a time: CUTLASS's default for 16 bits
BLOCK = 128  # rows and columns of attention in a block, as in FlashAttention-2 and 3


@cache
def tile_efficiency(kind: str, dtype: str, shape: tuple[int, ...], sms: int | None) -> float:
    """The share of the rate of full tiles that a kernel of this shape reaches on `sms` SMs: above 0, at most 1.

    It is 1 if the shape or the number of SMs is unknown, for memory-bound classes, for the delta rule, and for FP8 and
    FP4.
    """
    if kind not in FLOPS or not shape or sms is None or dtype in ("e4m3", "e2m1") or kind.startswith("delta_rule"):
        return 1.0
    if kind.startswith("attention"):
        sequence = shape[1]
        return sequence / (sequence + BLOCK)  # blocks on the diagonal are computed in full
    groups, m, n, k = shape if len(shape) == 4 else (1, *shape)
    return max(_of_tiles(groups * split, m, n, k / split, tile, sms) for tile in TILES for split in SPLITS)


def _of_tiles(groups: int, m: int, n: int, k: float, tile: tuple[int, int], sms: int) -> float:
    tiles = groups * ceil(m / tile[0]) * ceil(n / tile[1])
    return groups * m * n / (ceil(tiles / sms) * sms * tile[0] * tile[1]) * k / (k + STEP)


# --- rates


@dataclass(frozen=True)
class Rates:
    """Achieved rates of one spec: those of a table, scaled to its devices' peaks and its split of SMs.

    `fabric` prices transfers: it has the link rows of every kind of node. `points` has these rows too, for reports of
    how well they are known.
    """

    points: Mapping[tuple[str, str], tuple[Point, ...]]  # by class and dtype: rates of full tiles, with class factors
    fabric: Fabric  # of the whole cluster: prices messages, reductions and exchanges
    experts: ExpertTraffic  # the ranks with which one of these devices exchanges rows
    tensor_share: float = 1.0  # of the time of exchanges between tensor ranks that no product of theirs hides
    load: float = 1.0  # rows of the fullest expert rank of a layer, over the mean; all ranks wait for it
    launch_s: float = 0.0  # between two kernels of a stream, or for a call of one torch function
    host_read_s: float = 0.0  # until the host has read counts from its device
    linear: str = "fp32"  # dtype of the products of linears
    plain: str = "fp32"  # dtype of all other products
    cores: int | None = None  # CPU cores that the ranks of a node share; None: each rank has its own device
    ranks_of_node: int = 1
    sms: int | None = None  # over which tiles are spread; None: tiles are not modelled
    product_share: float = 1.0  # share of the SMs that products have at the rates of `points`
    beside_share: float = 1.0  # share of the SMs that an exchange leaves to compute beside it
    keeps_share: bool = False  # whether kernels are built for that share, so that an action's products never use more
    # by op that a library computes, and dtype: the rates of that library, if the table has some
    library_points: Mapping[tuple[str, str], tuple[Point, ...]] = field(default_factory=dict)
    carried: Mapping[str, float] = field(default_factory=dict)  # by class: factors that were measured on another device
    is_traced: bool = False  # whether the table has factors of a profile of training on the device
    borrowed: frozenset[str] = frozenset()  # classes whose rows are shares of the peaks of another device
    runs_kernels: bool = False  # whether ops run as kernels, on a GPU; CPUs run the ops that they stand for
    torch_ops: frozenset[str] = frozenset()  # ops that torch computes in many passes, though a kernel would take one
    fp32_flops: float = 1.0  # FLOP/s of products in FP32 without tensor cores, in which torch computes `torch_ops`
    rope: bool = False  # whether attention's rates cover only its core, without RoPE and the assembly of keys
    pair: float = 1.0  # how much longer two overlapped actions take than their lanes
    table: str = ""
    calibrated: bool = True  # False if a core of another CPU stands in for those of the spec
    sharing: Mapping[str, Sequence[int]] = field(default_factory=dict)  # by mesh axis: the ranks that split rows
    assumptions: tuple[str, ...] = ()  # about the device, where the table says nothing
    notes: Mapping[tuple[str, str], str] = field(default_factory=dict, compare=False)  # which rows stand in for others
    _rates_at: dict[tuple[str, str, tuple[int, ...], str], float] = field(
        default_factory=dict, compare=False, repr=False
    )
    _calls: dict[tuple[str, int, int], tuple[Cost, float]] = field(default_factory=dict, compare=False, repr=False)

    def with_load(self, load: float) -> Rates:
        """These rates, with another load of the fullest expert rank."""
        return replace(self, load=load, _calls={})

    # ------------------------------------------------------------ compute

    @cached_property
    def without_exchange(self) -> Rates:
        """Rates while no exchange runs: products have all SMs."""
        return self._with_product_share(1.0)

    @cached_property
    def beside_exchange(self) -> Rates:
        """Rates beside an exchange: products have the SMs that the exchange does not use."""
        return self._with_product_share(self.beside_share)

    def _with_product_share(self, share: float) -> Rates:
        """These rates, with products on a share of the SMs."""
        if share == self.product_share:
            return self

        def scale(points: tuple[Point, ...]) -> tuple[Point, ...]:
            return tuple((shape, rate * share / self.product_share) for shape, rate in points)

        points = {key: scale(entry) if key[0] in FLOPS else entry for key, entry in self.points.items()}
        by_op = {key: scale(entry) for key, entry in self.library_points.items()}
        return replace(self, points=points, library_points=by_op, product_share=share, _rates_at={}, _calls={})

    def compute_s(self, kind: str, cost: Cost, rows: int) -> float:
        """Seconds of one call of a segment of `kind` on `rows` received rows: the sum over its ops."""
        priced = self._calls.get((kind, id(cost), rows))
        if priced is None or priced[0] is not cost:  # costs are slow to hash, and each is asked for often
            time_s = sum(self.launch_s + self.kernel_s(kind, op, work, rows) for op, work in cost.ops)
            self._calls[kind, id(cost), rows] = priced = (cost, time_s)
        return priced[1]

    def kernel_s(self, kind: str, op: str, work: Cost, rows: int) -> float:
        """Seconds of an op of a segment of `kind`, without its launch."""
        return sum(time_s for _, time_s in self.kernels_s(kind, op, work, rows))

    def kernels_s(self, kind: str, op: str, work: Cost, rows: int) -> tuple[tuple[str, float], ...]:
        """Class and seconds of each kernel of an op. Attention has two if RoPE is a pass before its core."""
        name = kernel_class(op)
        shape = shape_at(work.shape, rows)
        moved_bytes = work.bytes + work.bytes_row * rows
        if self.is_on_torch(op, work):
            assert work.on_torch is not None
            return ((name, self.torch_s(work.on_torch)),)
        if name not in FLOPS:
            return ((name, moved_bytes / self.rate(name, "any", shape)),)
        dtype = self.dtype_of(kind, op, work)
        if self.runs_kernels and work.on_kernels is not None:
            executed = work.on_kernels
            products_s = executed.flops / self.rate(name, dtype, shape)
            return ((name, products_s + executed.bytes / self.memory_bytes),)
        flops = work.flops + work.flops_row * rows
        core = max(flops / self.rate(name, dtype, shape, op), moved_bytes / self.memory_bytes)
        if self.rope and name.startswith("attention"):
            return (name, core), ("rope", moved_bytes / self.rate("rope", "any", ()))
        return ((name, core),)

    def is_on_torch(self, op: str, work: Cost) -> bool:
        """Whether torch computes an op in many passes: no kernel takes its shapes, or the run names torch."""
        lacks_kernel = self.runs_kernels and work.on_kernels is None
        return work.on_torch is not None and (lacks_kernel or op in self.torch_ops)

    def temporary_bytes(self, op: str, work: Cost) -> int:
        """The most bytes of tensors that exist only within a call of an op on a GPU."""
        executed = work.on_torch if self.is_on_torch(op, work) else work.on_kernels if self.runs_kernels else None
        return 0 if executed is None else executed.temporary_bytes

    def torch_s(self, work: TorchWork) -> float:
        """Seconds of an op on torch, whose kernels run one after the other; without the first launch."""
        products_s, passes_s = work.flops / self.fp32_flops, work.bytes / self.memory_bytes
        return products_s + passes_s + (work.launches - 1) * self.launch_s

    def dtype_of(self, kind: str, op: str, work: Cost) -> str:
        """The dtype of a product. Gate and head are not in FP8 (arXiv 2412.19437 §3.3), nor are layers kept in BF16."""
        if "linear" not in op or kind in ("router", "head"):
            return self.plain
        high = self.linear in ("e4m3", "e2m1") and work.dtype and not is_packed(work.dtype)
        return self.plain if high else self.linear

    def rate(self, kind: str, dtype: str, shape: tuple[int, ...], op: str = "") -> float:
        """FLOP/s or byte/s of a class at a shape. `op`: one of the class that a library may compute."""
        by = op if (op, dtype) in self.library_points else ""
        key = (kind, dtype, shape, by)
        if key not in self._rates_at:
            points = self.library_points[by, dtype] if by else self.points[kind, dtype]
            self._rates_at[key] = rate_at(points, shape) * tile_efficiency(kind, dtype, shape, self.sms)
        return self._rates_at[key]

    @property
    def memory_bytes(self) -> float:
        """Byte/s of a copy of a large tensor, read and written."""
        return self.rate("copy", "any", ())

    def optimizer_time_s(self, moved_bytes: float) -> float:
        """Seconds of an optimizer that reads and writes `moved_bytes` of weights, gradients and state."""
        return moved_bytes / self.rate("optimizer", "any", ())

    def host_time_s(self, moved_bytes: float) -> float:
        """Seconds to copy `moved_bytes` between host and device, in either direction; on a CPU, to copy in memory."""
        return moved_bytes / self.rate(HOST, "any", ())

    def product_time_s(self, flops: float) -> float:
        """Seconds of `flops` FLOPs in large matrix products of dtype `plain`."""
        return flops / self.rate("gemm", self.plain, ()) if flops else 0.0

    def makespan_on_shared_cores(self, makespan_s: float, busy_s: Iterable[float]) -> float:
        """A makespan of ranks that share the cores of a node: no shorter than their work divided by the cores.

        `busy_s`: seconds that each rank of a node computes and copies. A rank that waits leaves its core to another.
        """
        if self.cores is None or self.cores >= self.ranks_of_node:
            return makespan_s
        return max(makespan_s, sum(busy_s) / self.cores)

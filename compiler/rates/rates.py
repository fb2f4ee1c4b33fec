"""What a spec's devices achieve on their two lanes: op → seconds of compute, exchange → seconds of communication.

The rows come from a rate table (compiler/rates/tables, or a file of `dsc calibrate`). None was fitted to a training
step. docs/rates.md says how a rate is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from compiler.ir import Buffer, Cost
from compiler.rates.kernels import FLOPS, class_of, shape_at
from compiler.rates.lookup import Point, link_rate_at, rate_at


@dataclass(frozen=True)
class Rates:
    """Achieved rates of one spec: those of a table, at its devices' peaks and for the SMs it gives to each side.

    `linear` is the dtype of products of linears, `plain` that of all others. An exchange sends every routed row
    `row_copies` times over the links of a node and `network_copies` times over the network, at `dispatch_bytes` and
    `combine_bytes` an element, scales among them. As in DeepEP's figures, a copy to the own node is counted.
    """

    points: Mapping[tuple[str, str], tuple[Point, ...]]  # by class and dtype; rates with the factors of classes in them
    seconds: Mapping[str, float]  # of launches and latencies, by class
    linear: str = "fp32"
    plain: str = "fp32"
    ranks: int = 1  # that exchange with each other
    several_nodes: bool = False
    row_copies: float = 1.0
    network_copies: float = 0.0
    dispatch_bytes: float = 4.0
    combine_bytes: float = 4.0
    cores: int | None = None  # CPU cores that the ranks of a node share; None: each rank has a device of its own
    ranks_of_node: int = 1
    compute: float = 1.0  # share of the SMs that compute
    rope: bool = False  # whether attention's rates are of its core alone, without RoPE and the assembly of keys
    pair: float = 1.0  # how much longer two overlapped actions take than their lanes
    table: str = ""
    assumptions: tuple[str, ...] = ()  # of what no row says
    _known: dict[tuple[str, str, tuple[int, ...]], float] = field(default_factory=dict, compare=False, repr=False)
    _calls: dict[tuple[str, int, int], tuple[Cost, float]] = field(default_factory=dict, compare=False, repr=False)

    # ------------------------------------------------------------ compute

    @cached_property
    def undivided(self) -> Rates:
        """Those of an action that exchanges nothing, beside no other: products have the SMs of communication, too."""
        faster = {
            (kind, dtype): tuple((shape, rate / self.compute) for shape, rate in points) if kind in FLOPS else points
            for (kind, dtype), points in self.points.items()
        }
        return replace(self, points=faster, compute=1.0, _known={}, _calls={})

    def compute_s(self, kind: str, cost: Cost, rows: int) -> float:
        """Seconds of one call of a segment of `kind` that meets `rows` received rows: its ops one after the other."""
        known = self._calls.get((kind, id(cost), rows))
        if known is None or known[0] is not cost:  # costs are large to hash, and one is asked for often
            time_s = sum(self.launch_s + self.kernel_s(kind, op, work, rows) for op, work in cost.ops)
            self._calls[kind, id(cost), rows] = known = (cost, time_s)
        return known[1]

    @property
    def launch_s(self) -> float:
        """Between two kernels of a stream, or of calling one function of torch."""
        return self.seconds.get("launch", 0.0)

    def kernel_s(self, kind: str, op: str, work: Cost, rows: int) -> float:
        """Seconds that an op of a segment of `kind` computes, without its launch."""
        return sum(time_s for _, time_s in self.kernels_s(kind, op, work, rows))

    def kernels_s(self, kind: str, op: str, work: Cost, rows: int) -> tuple[tuple[str, float], ...]:
        """Class and seconds of each kernel of an op: one, but for attention where RoPE is a pass before its core."""
        of = class_of(op)
        shape = shape_at(work.shape, rows)
        moved_bytes = work.bytes + work.bytes_row * rows
        if of not in FLOPS:
            return ((of, moved_bytes / self.rate(of, "any", shape)),)
        flops = work.flops + work.flops_row * rows
        core = max(flops / self.rate(of, self.dtype_of(kind, op), shape), moved_bytes / self.memory_bytes)
        if self.rope and of.startswith("attention"):
            return (of, core), ("rope", moved_bytes / self.rate("rope", "any", ()))
        return ((of, core),)

    def dtype_of(self, kind: str, op: str) -> str:
        """The dtype of a product; neither gate nor head is in FP8, arXiv 2412.19437 §3.3."""
        return self.linear if "linear" in op and kind not in ("router", "head") else self.plain

    def rate(self, kind: str, dtype: str, shape: tuple[int, ...]) -> float:
        """FLOP/s or byte/s of a class at a shape."""
        key = (kind, dtype, shape)
        if key not in self._known:
            self._known[key] = rate_at(self.points[kind, dtype], shape)
        return self._known[key]

    @property
    def memory_bytes(self) -> float:
        """Byte/s of a copy of a large tensor, read and written."""
        return self.rate("copy", "any", ())

    def optimizer_time_s(self, moved_bytes: float) -> float:
        """Seconds of an optimizer that reads and writes so many bytes of weights, gradients and moments."""
        return moved_bytes / self.rate("optimizer", "any", ())

    # ------------------------------------------------------------ communication

    def exchange_time_s(self, to_experts: bool, buffers: Iterable[Buffer], rows: int) -> float:
        """Seconds of an all-to-all of `rows` routed rows of these buffers; none where nothing moves."""
        if not self.row_copies:
            return 0.0
        element = self.dispatch_bytes if to_experts else self.combine_bytes
        row = sum(int(b.shape[1]) * element if len(b.shape) == 2 else 4.0 for b in buffers)
        way = "dispatch" if to_experts else "combine"
        inside, between = rows * row * self.row_copies, rows * row * self.network_copies
        time_s = inside / self._link(f"{way}_node", self.ranks, inside)
        if between:
            time_s = max(time_s, between / self._link(f"{way}_network", self.ranks, between))
        return self.seconds["exchange_network" if self.several_nodes else "exchange_node"] + time_s

    def message_time_s(self, message: Buffer) -> float:
        """Seconds of a message between two pipeline ranks; these are `data` ranks apart."""
        place = "network" if self.several_nodes else "node"
        rate = self._link(f"message_{place}", 2, message.fixed_bytes)
        return self.seconds[f"latency_{place}"] + message.fixed_bytes / rate

    def all_reduce_time_s(self, moved_bytes: float, ranks: int) -> float:
        """Seconds of a ring that sums so many bytes over ranks: 2·(n−1)/n of them pass each link."""
        if ranks < 2:
            return 0.0
        place = "network" if self.several_nodes else "node"
        passed = 2 * (ranks - 1) / ranks * moved_bytes
        return 2 * (ranks - 1) * self.seconds[f"latency_{place}"] + passed / self._link("all_reduce", ranks, passed)

    def _link(self, kind: str, ranks: int, moved_bytes: float) -> float:
        return link_rate_at(self.points[kind, "any"], ranks, moved_bytes)

    def shared_s(self, makespan_s: float, busy_s: Iterable[float]) -> float:
        """A makespan where the ranks of a node share cores: no shorter than their work over the cores.

        `busy_s`: of each rank of a node, what it computes. Between this and a device of its own for each rank, a
        rank that waits leaves its core to another.
        """
        if self.cores is None or self.cores >= self.ranks_of_node:
            return makespan_s
        return max(makespan_s, sum(busy_s) / self.cores)

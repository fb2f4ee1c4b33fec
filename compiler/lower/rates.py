"""What a device achieves on its two lanes: op → seconds of compute, exchange → seconds of communication.

Peaks come from the spec's cluster; the share of a peak that is achieved is a constant here, with its source. None was
fitted to a training step. A device without peaks is a CPU core of the machine described at `CORE`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from compiler.ir import Buffer, Cost
from dsl.schema import Device, Moe, Precision, Spec

# Shares of the dense peak. FP8 of 1979 TFLOPS: DeepGEMM on H800, mean of its published table, dense and grouped; its
# weight gradients 878 to 1092. BF16 of 989 TFLOPS: 650 to 716 on H100 (Triton's persistent matrix product tutorial).
FP8_LINEAR, FP8_GROUPED, FP8_WGRAD = 0.61, 0.65, 0.50
BF16_LINEAR = 0.69
# FlashAttention-3, arXiv 2407.08608: 614 to 740 TFLOPS forward; backward 1.5 to 1.75 times FlashAttention-2's 300.
ATTENTION, ATTENTION_BACKWARD = 0.68, 0.50
# Copy of a large tensor on H200, read plus written, 4.3 of 4.8 TB/s. Small and strided kernels get less.
HBM = 0.90
# DeepSeek-V3's network, arXiv 2412.19437 and 2505.09343: 160 of 200 GB/s of NVLink, 40 of 50 GB/s of InfiniBand.
NVLINK, NIC = 0.80, 0.80
# Latency of a message over InfiniBand between leaf switches, and over NVLink (arXiv 2505.09343, table of latencies).
NETWORK_S, NVLINK_S = 3.7e-6, 3.3e-6
OP_S = 2e-6  # between two kernels of a stream; in DeepSeek's public profile, gaps are 1.8 ms of 129
# Peaks of wider floats over the BF16 peak, H100 data sheet: TF32 495 and FP64 67 of 989 TFLOPS.
OVER_BF16 = {"bf16": 1.0, "e4m3": 2.0, "fp32": 0.5, "fp64": 0.068}


@dataclass(frozen=True, slots=True)
class Rates:
    """Achieved rates; FLOP/s and byte/s, seconds in `_s`. The defaults are `CORE`: one core of a laptop's share.

    `linear` is of products in the recipe's dtype for linears, `plain` of those in its dtype for activations. An
    exchange sends every routed row `row_copies` times over the links of a node and `network_copies` times between
    nodes, at `dispatch_bytes` and `combine_bytes` an element, scales among them.
    """

    linear: float = 1e11  # measured on this class of core: FP32 104 GFLOP/s in a product of 4096²
    grouped: float = 1e11
    wgrad: float = 1e11
    plain: float = 1e11
    attention: float = 5e10  # vectorised torch over blocks, about half of its products' rate
    attention_backward: float = 5e10
    memory_bytes: float = 3e10  # copy 30 GB/s
    op_s: float = 5e-6  # calling one torch function
    node_bytes: float = 7e8  # gloo, all-to-all of 16 MiB in 19 to 27 ms
    network_bytes: float = 7e8
    message_bytes: float = 7e8
    exchange_s: float = 4e-4  # gloo, all-to-all of 4 KiB
    message_s: float = 1e-4
    row_copies: float = 1.0
    network_copies: float = 0.0
    dispatch_bytes: float = 4.0
    combine_bytes: float = 4.0

    def compute_s(self, kind: str, cost: Cost, rows: int) -> float:
        """Seconds of one call of a segment of `kind` that meets `rows` received rows: its ops one after the other."""
        return sum(self._op_s(kind, op, work, rows) for op, work in cost.ops)

    def _op_s(self, kind: str, op: str, work: Cost, rows: int) -> float:
        flops, moved = work.flops + work.flops_row * rows, work.bytes + work.bytes_row * rows
        return self.op_s + max(flops / self._flops(kind, op), moved / self.memory_bytes)

    def _flops(self, kind: str, op: str) -> float:
        if "attention" in op:
            return self.attention_backward if op.endswith("_dgrad") else self.attention
        if "linear" not in op or kind in ("router", "head"):  # neither gate nor head is in FP8, arXiv 2412.19437 §3.3
            return self.plain
        if op.endswith("_wgrad"):
            return self.wgrad
        return self.grouped if op.startswith("grouped") else self.linear

    def exchange_time_s(self, to_experts: bool, buffers: Iterable[Buffer], rows: int) -> float:
        """Seconds of an all-to-all of `rows` routed rows of these buffers; none where nothing moves."""
        if not self.row_copies:
            return 0.0
        element = self.dispatch_bytes if to_experts else self.combine_bytes
        row = sum(int(b.shape[1]) * element if len(b.shape) == 2 else 4.0 for b in buffers)
        inside = rows * row * self.row_copies / self.node_bytes
        return self.exchange_s + max(inside, rows * row * self.network_copies / self.network_bytes)

    def message_time_s(self, message: Buffer) -> float:
        """Seconds of a message between two pipeline ranks."""
        return self.message_s + message.fixed_bytes / self.message_bytes


CORE = Rates()


def rates_of(spec: Spec) -> Rates:
    """The rates of the spec's devices under its recipe, SM split and routing."""
    node, precision = spec.cluster.node, spec.precision
    device = node.device
    copies = _copies(spec)
    moved = {
        "row_copies": 1.0 if spec.parallel.expert > 1 else 0.0,
        "network_copies": copies,
        "dispatch_bytes": _element_bytes(precision.dispatch, precision),
        "combine_bytes": _element_bytes(precision.combine, precision),
    }
    if device.bf16 is None:
        return Rates(**moved)
    share = 1 - spec.sm.communication / device.sms if device.sms else 1.0  # of SMs that compute
    peak = device.bf16 * share
    links = _links(spec)
    fp8 = precision.linear == "e4m3"
    linear = _peak(device, precision.linear) * share
    return Rates(
        linear=linear * (FP8_LINEAR if fp8 else BF16_LINEAR),
        grouped=linear * (FP8_GROUPED if fp8 else BF16_LINEAR),
        wgrad=linear * (FP8_WGRAD if fp8 else BF16_LINEAR),
        plain=_peak(device, precision.compute) * share * BF16_LINEAR,
        attention=peak * OVER_BF16[precision.compute] * ATTENTION,
        attention_backward=peak * OVER_BF16[precision.compute] * ATTENTION_BACKWARD,
        memory_bytes=(device.hbm or device.bf16 / 300) * HBM,
        op_s=OP_S,
        **links,
        **moved,
    )


def _peak(device: Device, dtype: str) -> float:
    """The dense peak of products in a dtype; a device that names no FP8 peak has none above BF16."""
    assert device.bf16 is not None
    return (device.fp8 or device.bf16) if dtype == "e4m3" else device.bf16 * OVER_BF16[dtype]


def _links(spec: Spec) -> dict[str, float]:
    """Within a node over NVLink, between nodes over one NIC a device; what is not named is the other."""
    node = spec.cluster.node
    inside = (node.nvlink or node.nic or CORE.node_bytes) * NVLINK
    between = (node.nic or node.nvlink or CORE.network_bytes) * NIC
    several = spec.cluster.nodes > 1
    return {
        "node_bytes": inside,
        "network_bytes": between,
        "message_bytes": between if several else inside,  # neighbours are `data` ranks apart
        "exchange_s": NVLINK_S + (NETWORK_S if several else 0.0),
        "message_s": NETWORK_S if several else NVLINK_S,
    }


def _copies(spec: Spec) -> float:
    """Copies between nodes per routed row: a token crosses once to each other node it goes to, at most.

    Where routing keeps a token to some groups of experts, it goes to the nodes of these groups alone.
    """
    moe = next((layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe)), None)
    nodes = -(-spec.parallel.expert // spec.cluster.node.devices)
    if moe is None or nodes == 1:
        return 0.0
    of_a_group = -(-nodes // moe.groups)
    return min(moe.top_k, moe.top_groups * of_a_group, nodes - 1) / moe.top_k


def _element_bytes(dtype: str, precision: Precision) -> float:
    """Bytes of an element on its way, with its share of an FP32 scale if it is in FP8."""
    size = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "e4m3": 1.0}[dtype]
    tile = precision.activation_tile
    return size + (4 / (tile.rows * tile.columns) if dtype == "e4m3" and tile else 0.0)

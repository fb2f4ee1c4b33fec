"""Kernel classes: in what their rates are stated, and what stands in for a class that has no rows. An op's class is a
fact of its rule (`compiler.model.ops`).

A rate depends on the class, the dtype and the shape of a kernel. The shape is

    products            (m, n, k): m rows and n columns, summed over k; dgrad and wgrad in their own extents
    grouped products    (groups, m, n, k): m, or k of weight gradients, is the mean of the groups
    attention           (tokens, sequence, heads, width of a key, width of a value), and so of the delta rule
    all others          (rows, columns) of the largest tensor that is read or written
"""

from __future__ import annotations

from collections.abc import Sequence

SEQUENCES = ("attention", "attention_backward", "delta_rule", "delta_rule_backward")  # of whole sequences
FLOPS = ("gemm", "grouped_gemm", "wgrad", "grouped_wgrad", *SEQUENCES)  # rates in FLOP/s
MEMORY = (
    *("rope", "norm", "swiglu", "add", "permute", "quantise", "cast", "cross_entropy", "router", "embedding", "copy"),
)
LINKS = (  # rates in byte/s; shape (ranks, bytes a rank sends)
    *("dispatch_node", "combine_node", "dispatch_network", "combine_network"),
    *("message_node", "message_network", "all_reduce_node", "all_reduce_network"),
)
HOST = "host"  # copies between an accelerator and pinned memory of its host, byte/s a direction
BYTES = (*MEMORY, *LINKS, "optimizer", HOST)
# Seconds: of a launch, what a transfer takes however small it is, and until a host has numbers of its device.
SECONDS = ("launch", "exchange_node", "exchange_network", "latency_node", "latency_network", "host_read")
PAIR = "pair"  # of factors alone: of two micro-batches over two lanes, beside what both lanes take
CLASSES = (*FLOPS, *BYTES, *SECONDS)

# Where a class has no rows, the rows of the next that has.
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
    "exchange_network": ("latency_network",),
    "exchange_node": ("latency_node",),
}


def shape_at(shape: Sequence[int | str], rows: int) -> tuple[int, ...]:
    """A shape with `rows` received rows for "R": spread evenly over the groups where a product has these."""
    groups = shape[0] if len(shape) == 4 else 1
    assert isinstance(groups, int)
    return tuple(max(1, rows // groups) if extent == "R" else int(extent) for extent in shape)

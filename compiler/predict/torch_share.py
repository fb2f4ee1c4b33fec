"""The share of the compute that torch takes for ops without a kernel, and whether `dsc compile` accepts it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from compiler.ir import Plan
from compiler.machine.rates import Rates
from compiler.model.ops import GRADIENTS
from compiler.model.ops.implementations import KEY_OF, TORCH
from compiler.plan.split_blocks import balanced_rows
from compiler.predict.prediction import TorchShare
from dsl.schema import Spec

LIMIT = 0.2  # of the compute: more is refused unless the spec names an implementation


class SlowOpsError(ValueError):
    """Torch would take too much of the time of a step. The message has the edit that accepts it, for the author of the
    spec."""


def torch_shares(spec: Spec, plan: Plan, rates: Rates) -> tuple[TorchShare, ...]:
    """The ops that torch computes, by key of `kernels`, the largest share first; empty on CPUs."""
    if not rates.runs_kernels:
        return ()
    rows, all_s = balanced_rows(spec), 0.0
    seconds, temporary_bytes = defaultdict[str, float](float), Counter[str]()
    segments = {use.segment.key: (use.segment.kind, plan.cuts[use.site].costs) for use in plan.uses}
    num_uses = Counter(use.segment.key for use in plan.uses)
    for segment, (kind, costs) in segments.items():
        for op, work in (pair for _, cost in costs for pair in cost.ops):
            op_s = num_uses[segment] * rates.kernel_s(kind, op, work, rows)
            all_s += op_s
            if work.on_torch is not None and rates.is_on_torch(op, work):
                seconds[op] += op_s
                temporary_bytes[op] = max(temporary_bytes[op], work.on_torch.temporary_bytes)
    shares = [
        _share_of_key(
            key, {op: op_s / all_s for op, op_s in seconds.items() if KEY_OF[op] == key}, temporary_bytes, spec
        )
        for key in dict.fromkeys(KEY_OF[op] for op in seconds)
    ]
    return tuple(sorted(shares, key=lambda share: -share.share))


def _share_of_key(key: str, by_op: Mapping[str, float], temporary_bytes: Mapping[str, int], spec: Spec) -> TorchShare:
    share = sum(by_op.values())
    return TorchShare(
        key=key,
        ops=tuple(sorted([op for op in by_op if op not in GRADIENTS] or by_op)),
        share=share,
        temporary_bytes=max(temporary_bytes[op] for op in by_op),
        is_accepted=share <= LIMIT or getattr(spec.kernels, key) is not None,
    )


def refusals(shares: Iterable[TorchShare]) -> tuple[str, ...]:
    """A sentence for each key that `dsc compile` refuses, with the edit that accepts it."""
    return tuple(
        f"torch would take {share.share:.0%} of the compute for {share.names}, as no kernel takes their shapes: "
        f"write `kernels {{ {share.key} = {TORCH} }}` in the run to accept it"
        for share in shares
        if not share.is_accepted
    )


def refuse_slow_ops(spec: Spec, plan: Plan, rates: Rates) -> None:
    """Raise SlowOpsError if torch would take more than `LIMIT` of the compute, and the spec names no implementation."""
    if sentences := refusals(torch_shares(spec, plan, rates)):
        raise SlowOpsError("; ".join(sentences))

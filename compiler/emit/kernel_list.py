"""kernels.json of a build: every op of every segment, its kernel, and what was fused into it; and the optimizer's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from compiler.ir import Emitted, Plan, SegmentCode
from compiler.kernels.calls import Call
from compiler.plan.blocks import balanced_rows
from compiler.predict.memory_state import held_and_owned
from dsl.memory import update_bytes
from dsl.schema import Spec
from runtime.strict_json import pretty


def kernels_json(
    spec: Spec, plan: Plan, segments: Mapping[object, SegmentCode], optimizer: Call, kernel: str | None
) -> str:
    """Segments by their key, in the order of the model. `rows`: received rows that bytes are said for.

    `optimizer`, and the `kernel` file that it has: what a step of it moves, on the pipeline rank that updates most.
    """
    used = Counter(use.segment.key for use in plan.uses)
    first = {use.segment.key: use for use in reversed(plan.uses)}
    rows = balanced_rows(spec)
    data = {
        "rows": rows,
        "unfused": list(spec.unfused),
        "segments": [
            {
                "segment": segments[key].name,
                "kind": first[key].segment.kind,
                "site": first[key].site,
                "uses": count,
                "ops": [_op(call, rows) for call in segments[key].calls],
            }
            for key, count in used.items()
        ],
        "optimizer": {"op": optimizer.op, "kernel": kernel, **_update(spec, plan)},
    }
    return pretty(data)


def _op(call: Emitted, rows: int) -> dict[str, Any]:
    said: dict[str, Any] = {"function": call.function, "op": call.op, "kernel": call.kernel or None}
    return said | ({"of": call.parts, "bytes_saved": call.saved + call.saved_row * rows} if call.parts else {})


def _update(spec: Spec, plan: Plan) -> dict[str, int]:
    """Elements that a device updates at most, and the bytes that are read and written for them."""
    elements = max(held_and_owned(spec, plan)[1].values())
    return {"elements": elements, "bytes": elements * update_bytes(spec.precision, spec.train.optimizer)}

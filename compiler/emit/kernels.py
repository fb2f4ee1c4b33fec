"""kernels.json of a build: every op of every segment, its kernel, and what was fused into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from compiler.emit.files import pretty
from compiler.ir import Emitted, Plan, SegmentCode
from compiler.pipeline import balanced_rows, uses
from dsl.schema import Spec


def kernels_json(spec: Spec, plan: Plan, segments: Mapping[object, SegmentCode]) -> str:
    """Segments by their key, in the order of the model. `rows`: received rows that bytes are said for."""
    used = Counter(use.segment.key for use in uses(plan))
    first = {use.segment.key: use for use in reversed(uses(plan))}
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
    }
    return pretty(data)


def _op(call: Emitted, rows: int) -> dict[str, Any]:
    said: dict[str, Any] = {"function": call.function, "op": call.op, "kernel": call.kernel or None}
    return said | ({"of": call.parts, "bytes_saved": call.saved + call.saved_row * rows} if call.parts else {})

"""kernels.json of a build: every op of every segment, its kernel, and what was fused into it; of weights of few
bits; and the optimizer's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from compiler.emit.kernels import reason
from compiler.emit.kernels.calls import Call
from compiler.emit.quantised import Making
from compiler.ir import Emitted, Plan, SegmentCode
from compiler.plan.split_blocks import balanced_rows
from compiler.predict.memory_state import kept_elements
from dsl.closed_forms.memory import update_bytes
from dsl.schema import Spec
from runtime import contract
from runtime.system.strict_json import pretty


def kernels_json(
    spec: Spec,
    plan: Plan,
    segments: Mapping[object, SegmentCode],
    quantised: Mapping[str, Making],
    updates: Sequence[tuple[Call, str | None]],
) -> str:
    """Segments by their key, in the order of the model. `rows`: received rows that bytes are said for.

    `quantised`: what makes each weight of few bits. `updates`: the calls of the rows of the optimizer, each with the
    kernel file that it has; what a step of it moves is said of the pipeline rank that updates most.
    """
    used = Counter(use.segment.key for use in plan.uses)
    first = {use.segment.key: use for use in reversed(plan.uses)}
    rows, (optimizer, *rest) = balanced_rows(spec), _steps(spec, plan, updates)
    return pretty(
        contract.KernelList(
            rows=rows,
            unfused=tuple(spec.unfused),
            segments=tuple(
                contract.SegmentKernels(
                    segment=segments[key].name,
                    kind=first[key].segment.kind,
                    site=first[key].site,
                    uses=count,
                    ops=tuple(_op(call, rows) for call in segments[key].calls),
                )
                for key, count in used.items()
            ),
            quantised=_weights(quantised),
            optimizer=optimizer,
            rest=rest[0] if rest else None,
        )
    )


def _op(call: Emitted, rows: int) -> contract.EmittedOp:
    saved = call.saved + call.saved_row * rows if call.parts else None
    return contract.EmittedOp(call.function, call.op, call.kernel or None, call.reason or None, call.parts, saved)


def _weights(quantised: Mapping[str, Making]) -> tuple[contract.QuantisedWeights, ...]:
    """What makes the weights of few bits, and how many, in the order of the model."""
    calls = Counter((each.op, each.kernel.name if each.kernel else None, each.reason) for each in quantised.values())
    return tuple(contract.QuantisedWeights(op, kernel, why, count) for (op, kernel, why), count in calls.items())


def _steps(spec: Spec, plan: Plan, updates: Sequence[tuple[Call, str | None]]) -> Iterator[contract.OptimizerStep]:
    """What a step of each row of the optimizer moves, on the device that updates most."""
    kept = kept_elements(spec, plan)
    for (call, kernel), row, owned in zip(updates, spec.train.optimizer.rows, (kept.owned, kept.rest), strict=False):
        elements = max(owned.values(), default=0)
        why = None if kernel else reason(call.op, call.arguments)
        yield contract.OptimizerStep(call.op, kernel, why, elements, elements * update_bytes(spec.precision, row))

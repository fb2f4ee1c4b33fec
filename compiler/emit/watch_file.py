"""watch.json of a build: what is predicted of its step, for those who watch the run."""

from __future__ import annotations

from compiler.predict.planned_step import PURPOSES, Planned
from compiler.predict.predict import devices_of
from dsl.schema import Spec
from runtime import contract

DIGITS = 6  # of a predicted number


def watch_json(spec: Spec, planned: Planned) -> str:
    """The text of the file. `planned`: the prediction of a step of the spec."""
    step, within, devices = planned.step, spec.train.within, devices_of(spec)
    peaks = [count * device.bf16 for count, device in devices if device.bf16 is not None]
    links = (
        contract.Link(level.name, purpose, moved)
        for level in planned.network.levels
        for purpose, moved in zip(PURPOSES, level.moved, strict=True)
        if moved
    )
    return contract.Watch(
        run=spec.name.partition(".")[0],
        model=spec.model.name,
        cluster=spec.cluster.name,
        devices=planned.network.num_devices,
        phase=within.number if within else 1,
        phases=within.phases if within else 1,
        flops_per_token=_rounded(planned.flops.causal),
        peak_flops=float(sum(peaks)) if len(peaks) == len(devices) else None,
        mfu=_rounded(planned.mfu.causal * step.seconds / planned.seconds) if planned.mfu else None,
        step_s=_rounded(planned.seconds),
        tokens=step.tokens,
        bubble=_rounded(min(1.0, step.mean.bubble_s / planned.seconds)),
        memory_bytes=tuple(rank.peak_bytes for rank in planned.ranks),
        capacity_bytes=tuple(rank.capacity_bytes for rank in planned.ranks),
        links=tuple(links),
        metrics=contract.Metrics(**spec.metrics.model_dump()) if spec.metrics else None,
        calibrated=planned.calibrated,
    ).to_json()


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")

"""The share of a step in which no kernel runs, by torch's profiler; and whether CUDA graphs give the same bits. A
worker.

A device that waits for its host shows gaps between kernels. The kernels of the quickstart are short, so its gaps show
more of the host's time than those of a large model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runtime.system.workers import serve

WARM_UP, STEPS = 4, 3  # graphs are captured in step 2 and replayed in later ones


def tasks(build: Path) -> list[dict[str, Any]]:
    return [{"name": build.name, "build": str(build)}]


def handle(task: Mapping[str, Any], device: str = "cuda") -> dict[str, Any]:
    """Milliseconds of a step, the share in which a kernel runs, the number of kernels, and the longest gap in µs.

    If the build has graphs, it fails unless the steps that capture and replay them give the bits of launches.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from runtime.build.build import Build
    from runtime.comm.connect import Endpoint
    from runtime.launch.heartbeat import Board
    from runtime.observe.device import set_up_cuda
    from runtime.step.trainer import Trainer
    from tests.runtime.step.samples import RandomSamples

    if device == "cuda":
        set_up_cuda()
    build = Build.open(Path(task["build"]))
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)

    def warmed(graphs: bool) -> tuple[Trainer, list[float]]:
        trainer = Trainer(build, 0, samples, samples, Board(1).bind(0), Endpoint(torch.device(device)))
        trainer.executor.graphs.is_on = graphs and device == "cuda"
        losses = [trainer.train_step()["loss"] for _ in range(WARM_UP)]
        return trainer, losses

    trainer, losses = warmed(graphs=True)
    if trainer.executor.graphs.exist:
        plain, expected = warmed(graphs=False)
        pairs = zip(trainer.state.buckets, plain.state.buckets, strict=True)
        if losses != expected or not all(torch.equal(ours.parameters, theirs.parameters) for ours, theirs in pairs):
            return {"failed": f"graphs give other bits: losses {losses} instead of {expected}"}
        del plain
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as record:
        for _ in range(STEPS):
            trainer.train_step()
        if device == "cuda":
            torch.cuda.synchronize()
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in record.events() or ()
        if event.device_type.name == "CUDA" or device != "cuda"
    ]
    return busy(kernels)


def busy(kernels: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """Merge (start, end) in µs of kernels on all streams."""
    ordered = sorted(kernels)
    if not ordered:
        return {"failed": "the profiler saw no kernel"}
    covered, longest, end = 0.0, 0.0, ordered[0][0]
    for start, stop in ordered:
        longest = max(longest, start - end)
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    span = end - ordered[0][0]
    return {
        "step_ms": round(span / STEPS / 1e3, 3),
        "busy": round(covered / span, 4) if span else 1.0,
        "kernels": len(ordered) // STEPS,
        "longest_gap_us": round(longest, 1),
    }


if __name__ == "__main__":
    sys.exit(serve(handle))

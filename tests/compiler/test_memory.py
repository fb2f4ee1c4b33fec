"""A plan that its devices, or this machine, cannot hold is reported before anybody waits for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.emit.build_summary import fullest, memory_error_text, parts_of
from compiler.pipeline import lower_spec
from compiler.predict.prediction import size
from dsl.closed_forms.memory import lower_bound
from dsl.load import resolve
from runtime.launch.room import free_bytes, memory_shortage
from tests.runtime.plans import small_plan

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "specs" / "quickstart.dsc"


def test_a_device_smaller_than_the_plan_is_reported_and_one_as_large_is_not() -> None:
    spec = resolve(QUICKSTART).spec
    needed = fullest(spec, lower_spec(spec))[1].total
    assert lower_bound(spec).total < needed  # so `dsc check` passes both
    for memory, is_too_small in ((needed, False), (needed - 1, True)):
        smaller = resolve(QUICKSTART, overrides=[f"cluster.node.device.memory={memory / 1000:.3f}KB"]).spec
        message = memory_error_text(smaller, lower_spec(smaller))
        assert bool(message) == is_too_small
    assert f"the {size(needed - 1)} of device cpu" in message
    assert "2 pipeline ranks of 2" in message


def test_smaller_batches_that_hold_more_memory_are_reported() -> None:
    """Micro-batches of `interleaved` go in groups of at least 16, on as many ranks: 30 in one, 34 in two."""
    grown = ["schedule.name=interleaved", "train.batch.from=3328", "train.batch.to=4352"]
    spec = resolve(ROOT / "specs" / "deepseek-v3.dsc", overrides=grown).spec
    lowered = lower_spec(spec)
    rank, memory = fullest(spec, lowered)
    peak_of_30, peak_of_34 = (lowered.certificates[f"train_{n}"].peak_bytes[rank] for n in (30, 34))
    largest = memory.total - memory.activations + peak_of_34
    assert memory.activations == peak_of_30 > peak_of_34
    steps = f"in steps of 30 micro-batches (interleaved; {size(largest)} in those of 34)"
    for devices, hint in ((largest, "steps of the largest batch"), (largest - 1, "suggests edits that make it fit")):
        device = spec.cluster.node.device.model_copy(update={"memory": devices, "reserve": 0})
        node = spec.cluster.node.model_copy(update={"device": device})
        smaller = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"node": node})})
        message = memory_error_text(smaller, lowered)
        assert f"rank {rank} needs the most, {size(memory.total)} {steps}; " in message and hint in message


def test_the_fullest_rank_is_the_sum_of_its_parts_and_of_no_other() -> None:
    spec = resolve(QUICKSTART).spec
    lowered = lower_spec(spec)
    rank, memory = fullest(spec, lowered)
    first = lowered.plan.mesh.rank(rank, 0)
    parameters = [r for r in lowered.plan.replicas if r.role == "parameter" and first in r.holders]
    elements = sum(r.num_elements for r in parameters)
    biases = sum(r.num_elements for r in lowered.plan.replicas if r.role == "bias" and first in r.holders)
    owned = sum(r.num_elements // (len(r.holders) if spec.parallel.zero else 1) for r in parameters)
    peak = max(c.peak_bytes[rank] for c in lowered.certificates.values())
    assert [amount for _, amount in parts_of(memory)] == [4 * (elements + biases), 4 * elements, 8 * owned, peak]
    assert memory.total == sum(amount for _, amount in parts_of(memory))


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max", 0, 3 * 1024), ("2048", 48, 2000), ("1000000", 0, 3 * 1024), ("100", 200, 0), ("", 0, 3 * 1024)],
)
def test_free_memory_is_limited_by_the_machine_and_the_cgroup(limit: str, used: int, free: int, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemFree:   1 kB\nMemAvailable:   3 kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert free_bytes(tmp_path, tmp_path) == free
    assert free_bytes(tmp_path, tmp_path / "none") == 3 * 1024


def test_ranks_that_this_machine_cannot_hold_are_not_started(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1000 kB\n")
    plan = small_plan(pp=2, dp=8, memory=(100_000, 28_000))
    assert memory_shortage(plan, None, tmp_path, tmp_path) == ""  # 1,024,000 bytes are there
    plan = replace(plan, memory=(100_000, 28_001))
    assert "the 16 ranks of this run hold 0.001GB together" in memory_shortage(plan, None, tmp_path, tmp_path)
    assert memory_shortage(plan, range(8, 16), tmp_path, tmp_path) == "", "the other half is on another machine"

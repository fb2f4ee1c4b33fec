"""Planned memory compared with independent counts: the certificate, a ledger of live values, and closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from compiler.ir import Use
from compiler.pipeline import lower_spec
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates, rates_of
from compiler.plan.split_blocks import held_rows
from compiler.predict.memory import MAX_POINTS, rank_memories, rank_peaks, thin_points, worst_held_rows
from compiler.predict.prediction import RankMemory
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import stage_costs
from compiler.program.lower.scheduler import Scheduler
from compiler.program.proof import prove
from compiler.schedule import SCHEDULES, stand_in
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from dsl.closed_forms import ramp
from dsl.closed_forms.memory import lower_bound
from dsl.load import load
from dsl.schema import BUILT_IN, Spec, Tile
from tests.compiler.program.proof.ledger import peak_bytes
from tests.runtime.step.specs import spec as small_spec
from tests.specs.shipped import RUNS, SPECS, shipped
from tests.specs.strategies import specs


def values(memory: RankMemory) -> int:
    return memory.activations + memory.buffers


@settings(max_examples=25)
@given(specs())
def test_peaks_are_those_of_memories(spec: Spec) -> None:
    lowering = Lowering(make_plan(spec), rank_rates(spec))
    schedule = Scheduler(spec, lowering).largest()
    memories = rank_memories(spec, lowering, schedule)
    expected = [(memory.pp_rank, memory.capacity_bytes, memory.peak_bytes) for memory in memories]
    peaks = rank_peaks(spec, lowering, schedule)
    assert [(peak.pp_rank, peak.capacity_bytes, peak.peak_bytes) for peak in peaks] == expected


@settings(max_examples=50)
@given(specs())
def test_peak_is_the_certificates_and_a_ledgers(spec: Spec) -> None:
    """The peak of every rank is the certificate's and a ledger's to the byte, and at least the bound of `dsc check`."""
    lowered, rows = lower_spec(spec), held_rows(spec)
    for name, certificate in lowered.certificates.items():
        if name.startswith("train"):
            schedule = lowered.schedules[name]
            planned = rank_memories(spec, lowered.lowering, schedule, rows=lambda rank, layer, micro_batch: rows)
            assert tuple(map(values, planned)) == certificate.peak_bytes
    program = lowered.programs[f"train_{lowered.main_schedule.num_micro_batches}"]
    counted = [peak_bytes(program, rank, rows) for rank in range(lowered.plan.mesh.pp)]
    ledger = rank_memories(spec, lowered.lowering, lowered.main_schedule, rows=lambda *_: rows)
    assert list(map(values, ledger)) == counted
    assert lower_bound(spec).total <= max(memory.peak_bytes for memory in ledger)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("of", ["v3", "qwen"])
def test_unlike_rows_of_every_layer_and_micro_batch(of: str, schedule: str) -> None:
    spec = small_spec(2, 2, 2, 6, of=of, schedule=schedule)
    lowered = lower_spec(spec)

    def rows(rank: int, layer: str, micro_batch: int) -> int:
        return (7 * rank + 5 * int(layer[1:]) + 3 * micro_batch) % 11

    planned = rank_memories(spec, lowered.lowering, lowered.schedules["train_6"], rows=rows)
    assert tuple(map(values, planned)) == prove(lowered.programs["train_6"], lowered.plan, rows).peak_bytes
    assert all(memory.worst_bytes is None for memory in planned)


@pytest.mark.parametrize("recompute", [(), ("rmsnorm", "mla_up", "swiglu")])
@pytest.mark.parametrize("schedule", ["dualpipe", "zbv"])
@pytest.mark.parametrize("of", ["v3", "qwen"])
def test_eight_bits(of: str, schedule: str, recompute: tuple[str, ...]) -> None:
    """Values with scales, rows that travel in one dtype and come back in another; the same program, the same bytes."""
    tile = Tile(rows=1, columns=1)  # equals its transpose; a ledger of rows counts such tiles by hand
    eight = {"linear": "e4m3", "dispatch": "e4m3", "activation_tile": tile, "weight_tile": Tile(rows=4, columns=4)}
    base = small_spec(2, 2, 2, 6, of=of, schedule=schedule)
    spec = base.model_copy(update={"precision": BUILT_IN["bf16"].model_copy(update=eight), "recompute": recompute})
    lowered, rows = lower_spec(spec), held_rows(spec)
    planned = rank_memories(spec, lowered.lowering, lowered.main_schedule, rows=lambda *_: rows)
    assert tuple(map(values, planned)) == lowered.certificates["train_6"].peak_bytes
    assert list(map(values, planned)) == [peak_bytes(lowered.programs["train_6"], rank, rows) for rank in range(2)]
    wide = base.model_copy(update={"precision": BUILT_IN["bf16"], "recompute": recompute})
    assert lower_bound(spec).total <= max(memory.peak_bytes for memory in planned)
    assert lowered.plan.stages != lower_spec(wide).plan.stages


@pytest.mark.parametrize(("file", "run"), RUNS)
def test_shipped_specs(file: str, run: str) -> None:
    """Memory in the program of the largest batch: as in its proof, and with everything the proof leaves out."""
    spec = shipped(file, run)
    plan, rows = make_plan(spec), held_rows(spec)
    lowering = Lowering(plan, rank_rates(spec))
    schedule = Scheduler(spec, lowering).largest()
    certificate = prove(Lowering(plan, rates_of(spec)).program(schedule), plan, rows)
    ledger = rank_memories(spec, lowering, schedule, rows=lambda *_: rows)
    assert tuple(map(values, ledger)) == certificate.peak_bytes
    assert lower_bound(spec).total <= max(memory.peak_bytes for memory in ledger)
    for at_rows, expected in zip(ledger, rank_memories(spec, lowering, schedule), strict=True):
        assert expected.worst_bytes is not None and at_rows.peak_bytes <= expected.peak_bytes <= expected.worst_bytes
        assert sum(tensor.bytes for tensor in expected.held_tensors) == values(expected)
        assert (
            sum(tensor.bytes for tensor in expected.held_tensors if tensor.kind in ("buffer", "message"))
            == expected.buffers
        )
        assert expected.peak_bytes == sum((expected.weights, expected.gradients, expected.optimizer, values(expected)))
    assert worst_held_rows(spec) >= rows


def test_smaller_batches_of_a_ramp_fit_if_the_largest_fits() -> None:
    """DualPipe on DeepSeek-V3's 16 ranks begins at 32 micro-batches; the fullest device holds no more with fewer."""
    spec = shipped("deepseek-v3.dsc", "pretrain")
    lowering = Lowering(make_plan(spec), rank_rates(spec))
    scheduler = Scheduler(spec, lowering)

    def peaks(schedule: Schedule) -> list[int]:
        return [memory.peak_bytes for memory in rank_memories(spec, lowering, schedule)]

    counts = ramp.micro_batches(spec)
    first, (largest,) = ([peaks(scheduler.schedule(n)) for n in sizes] for sizes in ((24, 26, 28, 30), counts[-1:]))
    assert counts[:4] == (24, 26, 28, 30)
    assert all(max(rank_peaks) <= max(largest) for rank_peaks in first)
    plan = lowering.plan
    put_off = peaks(stand_in(plan.stage_placement, plan.mesh.pp, 30, prompt=False))
    assert round(max(put_off) / max(first[-1]), 1) == 1.7


def test_over_time() -> None:
    """The curve begins and ends with what is always held, meets the peak once it is reached, and is short."""
    spec = load(SPECS / "quickstart.dsc")
    lowered = lower_spec(spec)
    schedule = lowered.main_schedule
    timeline = simulate(schedule, stage_costs(Lowering(lowered.plan, rates_of(spec))))
    for memory in rank_memories(spec, lowered.lowering, schedule, timeline):
        state = memory.weights + memory.gradients + memory.optimizer
        seconds, held_bytes = zip(*memory.timeline, strict=True)
        last = max(end for row in timeline.ticks for _, end in row) * (float(timeline.unit) / 1000)
        assert list(seconds) == sorted(seconds) and seconds[-1] <= last
        assert held_bytes[0] == state and max(held_bytes) == memory.peak_bytes and min(held_bytes) >= state
        assert len(held_bytes) <= MAX_POINTS
        peak_s = seconds[held_bytes.index(max(held_bytes))]
        step = next(
            str(step)
            for step, (start, end) in zip(schedule.actions[memory.pp_rank], timeline.spans[memory.pp_rank], strict=True)
            if float(start) / 1000 <= peak_s <= float(end) / 1000
        )
        assert step == memory.peak_action


@pytest.mark.parametrize("count", [3, 399, 400, 401, 5000])
def test_thinning_keeps_both_extremes(count: int) -> None:
    points = [(float(k), (k * 7919) % 1009 + (10**6 if k == count // 3 else 0)) for k in range(count)]
    thin = thin_points(points, MAX_POINTS)
    assert len(thin) <= MAX_POINTS and thin == sorted(thin)
    assert set(thin) <= set(points) and (thin[0], thin[-1]) == (points[0], points[-1])
    assert max(h for _, h in thin) == max(h for _, h in points)
    assert min(h for _, h in thin) == min(h for _, h in points)


def test_inside_of_a_segment_by_hand() -> None:
    """The bytes that a dense layer's functions make and free within a call, in the order of the nodes."""
    lowered = lower_spec(small_spec(2, 1, 1, 4, of="llama", schedule="1f1b"))
    use = next(
        step
        for stage in lowered.plan.stages
        for step in stage.steps
        if isinstance(step, Use) and step.segment.kind == "dense"
    )
    cut, (T, D) = lowered.plan.cuts[use.site], use.segment.inputs[0].shape
    assert isinstance(T, int) and isinstance(D, int)
    size = 8 if use.segment.inputs[0].dtype == "float64" else 4
    # F: x, rstd, up and swiglu are saved; the product with `down` is gone once it is added
    assert cut.inside_bytes("F", 0) == T * D * size
    # W adds to accumulators
    assert cut.inside_bytes("W", 0) == 0

"""The whole prediction: its invariants and symmetries, and what grows or shrinks with a key."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL
from compiler.machine.rates import Rates
from compiler.machine.rates.table import HOST
from compiler.plan.plan import make_plan
from compiler.plan.sharding import crossing_of
from compiler.plan.spec_rates import rank_rates
from compiler.predict.assumed import assumptions
from compiler.predict.memory import gib
from compiler.predict.predict import core_sharing_factor, predict, scheduler_of
from compiler.predict.prediction import Prediction
from compiler.predict.tail import groups_of
from compiler.program.lower import Lowering
from compiler.program.lower.scheduler import QUICK_EFFORT
from dsl.closed_forms.counts import parameters
from dsl.closed_forms.ramp import micro_batches
from dsl.closed_forms.stragglers import slowest_factor
from dsl.load import resolve
from dsl.schema import Spec
from tests.specs.shipped import NAMES, path_of

ROOT = Path(__file__).parents[3]
# The first phase of DeepSeek-V3.2, and of its small form, trains only indexers.
TRAINED_WHOLE = [f"{name}:v32.sparse" if name in ("deepseek-v3.2", "laptop-v32") else name for name in NAMES]
ROWS = ("forward_s", "backward_s", "weight_s", "overlapped_s", "bubble_s", "optimizer_s")


@cache
def spec_of(name: str, *overrides: str) -> Spec:
    return resolve(path_of(name), overrides=overrides).spec


@cache
def plan_of(name: str, *overrides: str) -> Prediction:
    return predict(spec_of(name, *overrides))


def said(spec: Spec, rates: Sequence[Rates]) -> tuple[str, ...]:
    """What a prediction assumes about a spec's plan and about rates."""
    return assumptions(spec, make_plan(spec), rates, 1.0, (), 0.0, None, ())


def test_sent_bytes_are_reported_for_the_device_that_sends_most() -> None:
    spec = spec_of("quickstart", "parallel.zero=3", "schedule.name=zb1p")
    sent = [crossing_of(make_plan(spec), rank, micro_batches(spec)[-1]) for rank in range(2)]
    assert sent[0].gradients < sent[1].gradients and sent[0].weights < sent[1].weights
    lines = said(spec, rank_rates(spec))
    assert any(line.endswith(f"a device sends up to {gib(sent[1].gradients)} per step") for line in lines)
    assert f"weights are gathered one segment ahead: a device sends up to {gib(sent[1].weights)} per step" in lines


def test_the_slowest_host_link_is_reported() -> None:
    spec = spec_of("single-gpu", "train.ema.decay=0.99")
    (rates,) = rank_rates(spec)
    kinds = [
        replace(rates, points={**rates.points, (HOST, "any"): (((), rate),)}, _rates_at={})
        for rate in (4e10, 2e10, 3e10)
    ]
    lines = [line for line in said(spec, kinds) if line.startswith("host and device exchange")]
    assert lines == ["host and device exchange 20 GB/s per direction, all devices and both directions at once"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_every_rank_sum_to_the_step(name: str) -> None:
    step = plan_of(name).step
    for rank in (*step.ranks, step.mean):
        assert sum(getattr(rank, row) for row in ROWS) == pytest.approx(step.seconds, rel=1e-9)
        assert all(getattr(rank, row) >= 0 for row in ROWS)
    for row in ROWS:
        mean = sum(getattr(rank, row) for rank in step.ranks) / len(step.ranks)
        assert getattr(step.mean, row) == pytest.approx(mean)
    assert (step.interval is not None) == plan_of(name).calibrated
    assert step.interval is None or 0 < step.interval.low_s < step.seconds < step.interval.high_s
    assert step.bound_s <= step.seconds * (1 + 1e-12)


@pytest.mark.parametrize("name", TRAINED_WHOLE)
def test_every_layer_is_on_one_stage_and_every_parameter_has_one_owner(name: str) -> None:
    prediction, spec = plan_of(name), spec_of(name)
    layers = [layer for row in prediction.stages for layer in row.layers]
    assert layers == list(range(spec.model.num_layers))
    parts = [part for row in prediction.stages for part in row.other_blocks]
    assert sorted(parts) == sorted(("embedding", "head", *(("mtp.0",) if spec.model.mtp else ())))
    assert all(len(set(row.ranks)) == len(row.ranks) and row.ranks for row in prediction.stages)
    plan, counts = make_plan(spec), parameters(spec.model)
    groups = [group for rank in range(plan.mesh.pp) for group in groups_of(plan, rank)]
    owned = sum(plan.mesh.columns * group.elements / len(group.holders) for group in groups)
    biases = counts.bias + (spec.model.mtp.depth * _bias(spec) if spec.model.mtp else 0)
    assert owned == pytest.approx(counts.total + counts.mtp - biases, rel=1e-12)


def _bias(spec: Spec) -> int:
    ffn = spec.model.layers[-1].ffn
    return getattr(ffn, "experts", 0) if parameters(spec.model).bias else 0


def test_mirrored_ranks_take_and_hold_the_same() -> None:
    v3 = plan_of("deepseek-v3")
    assert v3.stage_placement == BIDIRECTIONAL and len(v3.step.ranks) == 16
    for rank, mirrored in zip(v3.step.ranks[:8], v3.step.ranks[:7:-1], strict=True):
        for row in ROWS:
            assert getattr(rank, row) == pytest.approx(getattr(mirrored, row), rel=0.02)
    for memory, mirrored_memory in zip(v3.ranks[:8], v3.ranks[:7:-1], strict=True):
        assert (memory.weights, memory.optimizer) == (mirrored_memory.weights, mirrored_memory.optimizer)


RATES = {  # a key, and the values it goes through, each faster than the one before
    "cluster.node.nic": ("25GB/s", "50GB/s", "100GB/s", "400GB/s"),
    "cluster.node.nvlink": ("100GB/s", "200GB/s", "900GB/s"),
    "cluster.node.device.hbm": ("2TB/s", "3.35TB/s", "8TB/s"),
    "cluster.node.device.bf16": ("700TFLOPS", "989TFLOPS", "1500TFLOPS"),
    "cluster.node.device.fp8": ("989TFLOPS", "1979TFLOPS", "4PFLOPS"),
}
MANY = ("cluster.nodes=16384", "train.batch.from=196608", "train.batch.to=983040")
LAYOUT = "parallel.layout=Et*4|(tttt|)*14tmL"  # stages stay the same, whichever op is fast


@pytest.mark.parametrize("key", RATES)
def test_a_faster_device_or_link_is_never_predicted_slower(key: str) -> None:
    times = [plan_of("deepseek-v3", f"{key}={value}", LAYOUT).step.seconds for value in RATES[key]]
    assert times == sorted(times, reverse=True)
    assert key == "cluster.node.nvlink" or times[0] > times[-1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@pytest.mark.parametrize("key", sorted(set(RATES) - {"cluster.node.device.fp8"}))
def test_faster_is_never_slower_under_other_schedules(key: str, schedule: str) -> None:
    layers = spec_of("moe-8gpu").model.num_layers
    half = layers // 2
    layout = f"parallel.layout=Et*{half}|t*{layers - half}L"
    plan = ("parallel.pipeline=2", "parallel.expert=4", f"schedule.name={schedule}", layout)
    times = [plan_of("moe-8gpu", f"{key}={value}", *plan).step.seconds for value in RATES[key]]
    assert times == sorted(times, reverse=True)


def test_costs_of_a_trillion_tokens_follow_from_the_step() -> None:
    v3 = plan_of("deepseek-v3")
    hours = v3.step.seconds * v3.num_devices * 1e12 / v3.step.tokens / 3600
    assert v3.device_hours_per_trillion_tokens == pytest.approx(hours)
    assert v3.money.usd_per_trillion_tokens == pytest.approx(2 * hours)
    assert v3.whole_run.steps == 243_099 and v3.whole_run.tokens == 14_800_000_000_000
    steady = v3.step.seconds * v3.whole_run.tokens / v3.step.tokens
    assert steady < v3.whole_run.seconds < 1.05 * steady  # smaller batches have the same bubble


def test_bytes_per_token_equal_the_paper() -> None:
    exchange = plan_of("deepseek-v3").exchange
    assert exchange is not None
    assert (exchange.dispatch_bytes, exchange.combine_bytes, exchange.copies) == (7392, 14336, 4)
    assert plan_of("llama3-8b").exchange is None


def test_unknown_figures_are_none() -> None:
    quick = plan_of("quickstart")
    assert quick.mfu is None and quick.money.usd is None and quick.energy.kwh_per_trillion_tokens is None


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from dsl.load import resolve; from compiler.predict.predict import predict;"
        "predict(resolve('specs/deepseek-v3.dsc').spec); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_planning_for_more_devices_takes_no_more_work() -> None:
    """131,072 devices: the plan has as many values as the plan for 2,048, so planning takes as long."""
    small = plan_of("deepseek-v3")
    large = plan_of("deepseek-v3", *MANY)
    assert large.num_devices == 131_072 and dict(large.degrees)["data"] == 8192
    assert len(large.ranks) == len(small.ranks) and len(large.stages) == len(small.stages)
    assert large.step.num_micro_batches == small.step.num_micro_batches
    plans = [make_plan(spec_of("deepseek-v3")), make_plan(spec_of("deepseek-v3", *MANY))]
    assert len(plans[0].replicas) == len(plans[1].replicas)


def test_offload_moves_state_to_the_host_and_waits_for_the_link() -> None:
    """DeepSeek-V3: 8 bytes per element each way, FP32 master weights and two BF16 moments; peaks and steps add up."""
    at_once = "train.checkpoint.background=false"  # else there is a copy for saves on the host
    plain = plan_of("deepseek-v3", at_once)
    away = plan_of("deepseek-v3", "offload=[moments, master]", "train.ema.decay=0.999", at_once)
    for before, after in zip(plain.ranks, away.ranks, strict=True):
        assert after.optimizer == 0 and after.peak_bytes == before.peak_bytes - before.optimizer
        assert after.host_bytes == before.optimizer // 8 * 12, "and the average in FP32"
    assert away.host_bytes == 8 * max(rank.host_bytes for rank in away.ranks)
    longer = slowest_factor(spec_of("deepseek-v3").cluster)  # all of a step waits for the slowest device
    tail, part_s = away.step.tail.longer(1 / longer), 8 * 2**22 / 5.12e10
    ways_s = [rank.optimizer / 5.12e10 for rank in plain.ranks]  # of 8 bytes an element
    assert any(tail.host_s == pytest.approx(way_s - tail.update_s + 2 * part_s, rel=1e-3) for way_s in ways_s)
    assert away.step.seconds - away.step.tail.seconds == pytest.approx(plain.step.seconds - plain.step.tail.seconds)
    assert any("51.2 GB/s" in line for line in away.assumptions)
    moments = plan_of("deepseek-v3", "offload=[moments]", at_once)
    assert moments.ranks[5].host_bytes == plain.ranks[5].optimizer // 2


def test_offload_has_no_effect_on_a_cpu() -> None:
    at_once = "train.checkpoint.background=false"
    plain, away = (plan_of("quickstart", at_once, *overrides) for overrides in ((), ("offload=[moments]",)))
    assert [rank.peak_bytes for rank in plain.ranks] == [rank.peak_bytes for rank in away.ranks]
    assert away.host_bytes == 0 and away.step.seconds == plain.step.seconds
    averaged = plan_of("quickstart", "train.ema.decay=0.999")
    assert averaged.ranks[0].optimizer > plain.ranks[0].optimizer and averaged.step.seconds > plain.step.seconds


def test_ranks_share_cores_while_they_work_and_in_their_tails() -> None:
    """Times of actions are in milliseconds. Ranks of a column work equally long."""
    calls = list[tuple[float, list[float]]]()

    def makespan_on_shared_cores(alone_s: float, busy: list[float]) -> float:
        calls.append((alone_s, busy))
        return 2 * alone_s

    times = SimpleNamespace(step_time=lambda step, rank: step + rank)
    factors = [
        core_sharing_factor(
            SimpleNamespace(cores=cores, makespan_on_shared_cores=makespan_on_shared_cores),  # type: ignore[arg-type]
            SimpleNamespace(mesh=SimpleNamespace(columns=3)),  # type: ignore[arg-type]
            SimpleNamespace(actions=((1000, 2000), (2999,))),  # type: ignore[arg-type]
            times,  # type: ignore[arg-type]
            SimpleNamespace(makespan=5000),  # type: ignore[arg-type]
            (SimpleNamespace(seconds=0.5), SimpleNamespace(seconds=2.0)),  # type: ignore[arg-type]
        )
        for cores in (None, 2)
    ]
    assert factors == [1.0, 2.0]
    assert calls == [(7.0, [3.5, 5.0] * 3)]


@pytest.mark.parametrize(("long_fits", "quick_fits", "is_quick"), [(1, 1, 0), (1, 0, 0), (0, 1, 1), (0, 0, 0)])
def test_a_quick_search_serves_if_only_its_schedule_fits(
    monkeypatch: pytest.MonkeyPatch, long_fits: bool, quick_fits: bool, is_quick: bool
) -> None:
    """A shorter schedule may hold more than a device has."""
    spec = resolve(path_of("tiny"), None, ["schedule.name=auto"]).spec
    lowering, verdicts = Lowering(make_plan(spec), rank_rates(spec)), [bool(long_fits), bool(quick_fits)]
    monkeypatch.setattr("compiler.predict.predict._fits", lambda *_: verdicts.pop(0))
    assert (scheduler_of(spec, lowering)._effort == QUICK_EFFORT) == is_quick
    assert len(verdicts) == int(long_fits), "a quick search runs only if the long one's schedule does not fit"


def test_a_named_schedule_is_not_timed_to_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolve(path_of("tiny")).spec
    monkeypatch.setattr("compiler.predict.predict._fits", lambda *_: pytest.fail("it is timed"))
    scheduler_of(spec, Lowering(make_plan(spec), rank_rates(spec)))

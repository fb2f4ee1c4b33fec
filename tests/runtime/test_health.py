"""The reaction to wrong numbers, without ranks: decisions, fingerprints, differing ranks, and damaged files."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime import contract
from runtime.checkpoint.shard_manifest import Manifest
from runtime.comm.transport import Sums
from runtime.contract.recipe import HealthRecipe, SpikeRecipe
from runtime.data.order import Order
from runtime.data.position import Position
from runtime.observe.health import record, rerun
from runtime.observe.health.judge import BadStepError, JudgedStep, RecentSteps, Verdict, judge
from runtime.observe.health.replicas import ReplicaDifference, compare, fingerprint
from runtime.observe.health.watch import HealthWatch
from runtime.state.state import State, build_state
from tests.runtime.plans import small_plan

CPU = torch.device("cpu")
HEALTH = HealthRecipe("skip", SpikeRecipe(4.0, 5.0, "rollback"), window=8, back=3, most=2, rerun=False, hash=None)


# ---------------------------------------------------------------- decisions


def test_a_spike_exceeds_the_mean_by_the_set_number_of_deviations() -> None:
    """Against numpy, over random histories and numbers near both bounds."""
    drawn = np.random.default_rng(1)
    outcomes = set[bool]()
    for _ in range(500):
        rows = drawn.normal([5.0, 1.0], 0.2, (drawn.integers(4, 12), 2))
        recent = RecentSteps(tuple(JudgedStep(8 * i, *map(float, row)) for i, row in enumerate(rows)))
        last = rows[-8:]
        bounds = last.mean(0) + np.array([4.0, 5.0]) * last.std(0, ddof=1)
        loss, norm = map(float, bounds + drawn.normal(-0.2, 0.2, 2))
        verdict = judge(HEALTH, recent, 13, loss, norm)
        expected = loss > bounds[0] or norm > bounds[1]
        assert (verdict is not None) == expected and (verdict is None or verdict.action == "rollback")
        outcomes.add(bool(expected))
    assert outcomes == {True, False}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_losses_and_norms_never_change_weights(bad: float) -> None:
    for loss, norm in ((bad, 1.0), (1.0, bad)):
        for health, action in ((None, "stop"), (HEALTH, "skip"), (replace(HEALTH, not_finite="stop"), "stop")):
            verdict = judge(health, RecentSteps(), 1, loss, norm)
            assert verdict is not None and verdict.action == action


def test_zero_gradients_with_a_loss_are_judged_only_with_health() -> None:
    """A batch without targets has neither loss nor gradient. A run without a `health` block continues."""
    verdict = judge(HEALTH, RecentSteps(), 1, 5.7, 0.0)
    assert verdict is not None and verdict.action == "skip"
    assert judge(HEALTH, RecentSteps(), 1, 0.0, 0.0) is judge(None, RecentSteps(), 1, 5.7, 0.0) is None


def test_few_steps_show_no_spike() -> None:
    few = RecentSteps((JudgedStep(0, 5.0, 1.0), JudgedStep(8, 5.1, 1.0), JudgedStep(16, 5.0, 1.1)))
    assert judge(HEALTH, few, 4, 1e9, 1e9) is None
    assert judge(replace(HEALTH, spike=None), few, 4, 1e9, 1e9) is None


def test_the_run_stops_after_the_allowed_number_of_actions() -> None:
    for acted, action in (((93, 94), "stop"), ((92, 93), "skip"), ((99, 99), "stop"), ((99,), "skip")):
        verdict = judge(HEALTH, RecentSteps(acted=acted), 100, math.nan, 1.0)
        assert verdict is not None and verdict.action == action, acted


def test_a_rollback_skips_the_samples_drawn_since() -> None:
    """A rollback reaches as far as is remembered, and no further than its phase."""
    for steps, first_step, target, first in ((5, 0, 2, 16), (2, 0, 0, 0), (5, 4, 4, 32), (5, 5, 5, 40)):
        watch = HealthWatch(replace(small_plan().train, health=replace(HEALTH, not_finite="rollback")), RecentSteps())
        watch._first_step = first_step
        for step in range(1, steps + 1):
            assert watch.check(step, 5.0, 1.0, (8 * step - 8, 8 * step)) == 0
        with pytest.raises(BadStepError) as met:
            watch.check(steps + 1, math.nan, 1.0, (8 * steps, 8 * steps + 8))
        assert (met.value.target_step, met.value.samples) == (target, (first, 8 * steps + 8))


def test_the_recent_history_round_trips() -> None:
    recent = RecentSteps()
    for step in range(20):
        recent = recent.after(JudgedStep(8 * step, 5 + step / 3, 0.1), HEALTH).after_action(step)
    assert len(recent.steps) == 8 and recent.steps[0].first == 96
    recent = replace(recent, rollbacks=2)
    assert RecentSteps.from_json(json.loads(json.dumps(recent.to_json()))) == recent
    assert RecentSteps().to_json() == {} and RecentSteps.from_json({}) == RecentSteps.from_json(None) == RecentSteps()
    good = recent.to_json()
    for key, value in (("steps", [[1, 2]]), ("steps", [[1, "x", 1.0]]), ("acted", [-1]), ("rollbacks", True)):
        with pytest.raises(ValueError, match="does not say"):
            RecentSteps.from_json(good | {key: value})
    for document in ([], 3, {"steps": []}, good | {"more": 1}):
        with pytest.raises(ValueError, match="does not say"):
            RecentSteps.from_json(document or [0])


# ---------------------------------------------------------------- replicas


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_any_flipped_bit_changes_a_fingerprint(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips every bit of the first and last elements of each chunk, and random bits in between."""
    monkeypatch.setattr("runtime.observe.health.replicas._CHUNK", 64)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(150, generator=generator).to(dtype)
    bits, before = values.view(torch.uint8), fingerprint(values)
    assert fingerprint(values.clone()) == before
    size = values.element_size()
    for element in (0, 63, 64, 127, 128, 149, *torch.randint(150, (10,), generator=generator).tolist()):
        for bit in range(8 * size):
            bits[element * size + bit // 8] ^= 1 << bit % 8
            assert fingerprint(values) != before, (element, bit)
            bits[element * size + bit // 8] ^= 1 << bit % 8
    assert fingerprint(values) == before
    swapped = values.view(torch.uint8).view(-1, size).flip(0).view(-1).view(dtype)
    assert fingerprint(swapped) != before, "the order counts"


class Meeting:
    """Sums over ranks that are threads."""

    def __init__(self, world: int) -> None:
        self.barrier, self.given, self.calls = threading.Barrier(world), [torch.zeros(0)] * world, 0

    def of(self, rank: int) -> Sums:
        meeting = self

        class Rank:
            def all_reduce(self, tensor: Tensor) -> None:
                assert tensor.nbytes <= 1 << 16 and tensor.is_contiguous()
                meeting.given[rank] = tensor.clone()
                meeting.barrier.wait()
                total = torch.stack(meeting.given).sum(0)
                meeting.calls += rank == 0
                meeting.barrier.wait()
                tensor.copy_(total)

        return cast(Sums, Rank())


def compared(states: list[State], plan: contract.RunPlan) -> tuple[list[ReplicaDifference], int]:
    """The differences that all ranks find, and the number of sums."""
    meeting = Meeting(len(states))
    with ThreadPoolExecutor(len(states)) as pool:
        answers = [*pool.map(lambda entry: compare(entry[1], plan, entry[0], meeting.of(entry[0])), enumerate(states))]
    assert all(answer == answers[0] for answer in answers)
    return answers[0], meeting.calls


def plan_of(zero: int = 0, master: str = "float64") -> contract.RunPlan:
    """Four ranks: two weights on all ranks, one on ranks 1 and 3, and a bias."""
    rows = [contract.HeldParameter(name, name, (3, 5), init=0.1, decay=True) for name in ("all", "more", "some")]
    buckets = (
        contract.PlannedBucket("dense", (0, 1, 2, 3), (0,), (rows[0], rows[1])),
        contract.PlannedBucket("experts", (1, 3), (0,), (rows[2],)),
        contract.PlannedBucket("alone", (2,), (0,), (replace(rows[0], name="alone", tensor="alone"),)),
    )
    plan = small_plan(1, 4, zero=zero, buckets=buckets, biases=(contract.Bias("bias", (3,), (0, 1, 2, 3)),))
    return replace(plan, precision=replace(plan.precision, master=master))


def flip(tensor: Tensor, element: int) -> None:
    tensor.view(-1)[element : element + 1].view(torch.uint8)[0] ^= 2


CASES: dict[str, tuple[Callable[[State], Tensor], int, int, str, tuple[int, ...], tuple[int, ...]]] = {
    "weight": (lambda s: s.buckets[0].parameters, 17, 2, "more (weights)", (2,), (0, 1, 3)),
    "master": (lambda s: s.buckets[0].owned[0].master, 3, 0, "all (master weights)", (0,), (1, 2, 3)),
    "moment": (lambda s: s.buckets[0].owned[0].state["moment1"], 14, 3, "all (moment1)", (3,), (0, 1, 2)),
    "of two": (lambda s: s.buckets[1].parameters, 0, 3, "some (weights)", (1, 3), ()),
    "bias": (lambda s: s.biases["bias"], 2, 1, "bias", (1,), (0, 2, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_who_has_other_bits_is_named(case: str) -> None:
    plan = plan_of()
    states = [build_state(plan, rank, CPU) for rank in range(4)]
    assert compared(states, plan) == ([], 1), "one sum, where all is well"
    tensor_of, element, rank, tensor, ranks, agreeing = CASES[case]
    flip(tensor_of(states[rank]), element)
    differences, _ = compared(states, plan)
    assert differences == [ReplicaDifference(tensor, ranks, agreeing)]
    verb = f"ranks {ranks[0]} and {ranks[-1]} have different" if not agreeing else f"rank {rank} has other"
    assert str(differences[0]).startswith(f"{verb} bits of {tensor}")


def test_state_owned_by_one_rank_is_not_compared() -> None:
    """With `zero` of 1 or more, only owners have master weights and moments; all ranks have weights."""
    plan = plan_of(zero=1)
    states = [build_state(plan, rank, CPU) for rank in range(4)]
    flip(states[1].buckets[0].owned[0].master, 0)
    assert compared(states, plan)[0] == []
    flip(states[1].buckets[0].parameters, 0)
    assert [difference.ranks for difference in compared(states, plan)[0]] == [(1,)]
    flip(states[2].buckets[-1].parameters, 0)
    assert len(compared(states, plan)[0]) == 1, "nobody else has it"


def test_many_numbers_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.observe.health.replicas._MOST_AT_ONCE", 4)
    plan = plan_of()
    states = [build_state(plan, rank, CPU) for rank in range(4)]
    assert compared(states, plan) == ([], 3), "ten numbers: of the weights of all, of two, and of the bias"


def test_a_fingerprint_of_a_step_has_64_bits_and_depends_on_both_parts() -> None:
    numbers = (0, 1, -1, 2**63 - 1, -(2**63), 12345)
    for records, gradients in itertools.product(numbers, numbers):
        combined = rerun._combine(records, gradients)
        assert 0 <= combined < 2**64 and (combined - 3 * records - 5 * gradients) % 2**64 == 0
    assert rerun._combine(1, 0) != rerun._combine(0, 1)


@pytest.mark.parametrize(("erred", "named"), [((2,), "rank 2"), ((0, 3), "ranks 0 and 3")])
def test_all_ranks_with_other_losses_are_named(erred: tuple[int, ...], named: str) -> None:
    """A step that is computed again has other losses on some ranks, and the same gradients and sums on all."""
    plan, meeting = plan_of(), Meeting(4)

    def again(rank: int) -> rerun.RerunStep:
        losses = torch.ones(2)

        def compute() -> dict[str, Tensor]:
            losses.add_(rank in erred)
            return {"loss": torch.ones(1)}

        place = rerun.RerunRank(rank, 4, meeting.of(rank))
        state = build_state(plan, rank, CPU)
        return rerun.recompute_step(7, {"loss": torch.ones(1)}, compute, lambda: losses, state, place)

    with ThreadPoolExecutor(4) as pool:
        for rerun_step in pool.map(again, range(4)):
            reason = f"{named} had other losses or loads when the step was computed again"
            assert rerun_step.fault == rerun.Fault(7, erred, reason)


# ---------------------------------------------------------------- the record


def bad(step: int, samples: tuple[int, int], to: int | None = None) -> BadStepError:
    return BadStepError(step, Verdict("rollback" if to is not None else "stop", "why"), 1.0, 2.0, samples, to)


def test_a_resume_skips_the_samples_of_rollbacks(tmp_path: Path) -> None:
    position = Position(order=Order(16, 100, 1), next=8)
    order, other_order = record.identity(position, "text"), record.identity(position, "another text")
    record.record(tmp_path, order, bad(9, (24, 40), to=3))
    record.record(tmp_path, order, bad(7, (48, 56)))
    record.record(tmp_path, other_order, bad(12, (64, 72), to=5))
    first, second = record.rollbacks(tmp_path)
    assert (first.step, first.samples, first.target_step, second.target_step) == (9, (24, 40), 3, 5)
    assert record.read(tmp_path, order) == ((48, 56),) and record.read(tmp_path, other_order) == ()
    resumed, recent, note = record.restore_with_rollbacks(tmp_path, position, RecentSteps(), "text")
    assert resumed.skip == ((24, 40),) and recent.rollbacks == 2 and recent.acted == (9, 12)
    assert note == "rolled back at step 12: samples 24 to 39 are left out"
    assert record.restore_with_rollbacks(tmp_path, position, replace(recent, acted=()), "text")[2] == ""
    record.forget(tmp_path)
    assert record.rollbacks(tmp_path) == ()


def test_checkpoints_discarded_by_a_rollback() -> None:
    first, second = (record.Rollback({}, step, (0, 8), target) for step, target in ((9, 3), (7, 5)))
    done, none = (first, second), Manifest(4, 1, {}, ())
    for step, counted, gone in (
        (3, 0, False),
        (4, 0, True),
        (4, 1, False),
        (5, 1, False),
        (6, 1, True),
        (6, 2, False),
        (9, 3, False),
        (4, None, True),
        (4, -1, True),
        (9, "2", True),
        (9, True, True),
    ):
        manifest = Manifest(step, 1, {"health": {"rollbacks": counted}}, ())
        assert record.is_given_up(manifest, done) == gone, (step, counted)
    for meta in ({"health": None}, {"health": [2]}, {"health": {}}, {}):
        assert record.is_given_up(replace(none, meta=meta), done)
        assert not record.is_given_up(replace(none, step=3, meta=meta), done)
    assert not record.is_given_up(none, ())


ROW: dict[str, Any] = {"order": {}, "step": 5, "samples": [3, 7], "to": 2}


@pytest.mark.parametrize(
    "row",
    [ROW | {"to": -1}, ROW | {"to": "2"}, ROW | {"samples": [7, 3]}, ROW | {"samples": []}, ROW | {"step": 1.5}, 3, {}],
)
def test_invalid_records_are_ignored(tmp_path: Path, row: Any) -> None:
    for text in (json.dumps({"batches": [row], "rollbacks": [row]}), json.dumps(row), "", "[" * 100_000):
        (tmp_path / "health.json").write_text(text, "utf-8")
        assert record.rollbacks(tmp_path) == () and set(record.read(tmp_path, {})) <= {(3, 8)}

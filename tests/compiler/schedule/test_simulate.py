"""The simulator compared with identities from the literature and with a slow, separately written simulator."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest

from compiler.schedule import SCHEDULES
from compiler.schedule.costs import PAIR_KINDS, Costs, parse_costs, shipped_costs
from compiler.schedule.schedule import Schedule, ScheduleError
from compiler.schedule.simulate import peak_activations, simulate
from compiler.schedule.weights import StageWeight, Weight
from runtime.contract.actions import Action, actions_of


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "pair", "makespan"),
    [(8, 20, "3", 66), (8, 20, "2.5", 59), (8, 20, "2", 52), (4, 8, "3", 26), (16, 64, "3", 206)],
)
def test_dualpipe(ranks: int, micro_batches: int, pair: str, makespan: int) -> None:
    schedule = SCHEDULES["dualpipe"].generate(ranks, micro_batches)
    assert simulate(schedule, parse_costs(f"FB={pair}")).makespan == makespan


def test_dualpipe_idles_six_units_everywhere() -> None:
    timeline = simulate(SCHEDULES["dualpipe"].generate(8, 20), Costs())
    assert timeline.idle == (6,) * 8 and timeline.peak_activations == (9,) * 8


@pytest.mark.parametrize(("table", "tenths"), [("deepseek-v3-low", 179_783), ("deepseek-v3-high", 187_927)])
def test_dualpipe_of_v3(table: str, tenths: int) -> None:
    timeline = simulate(SCHEDULES["dualpipe"].generate(16, 120), shipped_costs(table))
    assert timeline.makespan == Fraction(tenths, 10)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 3), (5, 9), (8, 20), (7, 2)])
def test_1f1b(ranks: int, micro_batches: int) -> None:
    schedule = SCHEDULES["1f1b"].generate(ranks, micro_batches)
    timeline = simulate(schedule, parse_costs("F=1,I=1,W=0"))
    assert timeline.makespan == 2 * (micro_batches + ranks - 1)
    bubble = (ranks - 1) * (2 + 3)  # (P-1)(F+B)
    assert simulate(schedule, parse_costs("F=2,B=3")).idle == (bubble,) * ranks


def test_makespan_scales_with_the_unit() -> None:
    schedule, costs = SCHEDULES["dualpipe"].generate(6, 14), shipped_costs("deepseek-v3-high")
    seventh = replace(
        costs,
        F=costs.F / 7,
        I=costs.I / 7,
        W=costs.W / 7,
        pairs=tuple((kinds, time / 7) for kinds, time in costs.pairs),
    )
    assert simulate(schedule, seventh).makespan * 7 == simulate(schedule, costs).makespan


# ---------------------------------------------------------------- against another simulator


def plain(schedule: Schedule, costs: Costs) -> list[list[tuple[Fraction, Fraction]]]:
    """Run the rank whose next step can start first, step by step, and look everything up again each time."""
    P, N, placement = schedule.num_ranks, schedule.num_micro_batches, schedule.stage_placement
    last = placement.num_stages(P) - 1
    ends: dict[Action, Fraction] = {}
    spans: list[list[tuple[Fraction, Fraction]]] = [[] for _ in range(P)]

    def arrival(action: Action, rank: int) -> Fraction | None:
        stage = action.stage + (1 if action.kind in "BI" else -1)
        if action.kind == "W" or not 0 <= stage <= last:
            return Fraction(0)
        makers = [Action(kind, stage, action.micro_batch) for kind in ("BI" if action.kind in "BI" else "F")]
        ready = [ends[maker] for maker in makers if maker in ends]
        delay = 0 if placement.rank_of(P, N, stage, action.micro_batch) == rank else costs.latency
        return ready[0] + delay if ready else None

    while any(len(spans[rank]) < len(schedule.actions[rank]) for rank in range(P)):
        candidates = []
        for rank in range(P):
            if len(spans[rank]) < len(schedule.actions[rank]):
                step = schedule.actions[rank][len(spans[rank])]
                times = [arrival(action, rank) for action in actions_of(step)]
                if all(time is not None for time in times):
                    free = spans[rank][-1][1] if spans[rank] else Fraction(0)
                    candidates.append((max([free, *(time for time in times if time is not None)]), rank, step))
        start, rank, step = min(candidates, key=lambda candidate: candidate[:2])
        end = start + costs.step_time(step, rank)
        spans[rank].append((start, end))
        ends |= dict.fromkeys(actions_of(step), end)
    return spans


@pytest.mark.parametrize("name", SCHEDULES)
def test_agrees_with_a_plain_simulator(name: str) -> None:
    rng = random.Random(name)
    for ranks, micro_batches in ((2, 4), (4, 10)):
        schedule = SCHEDULES[name].generate(ranks, micro_batches)
        costs = random_costs(rng, schedule.stage_placement.num_stages(ranks), ranks)
        timeline = simulate(schedule, costs)
        assert [list(rank) for rank in timeline.spans] == plain(schedule, costs)
        busy = [sum(end - start for start, end in rank) for rank in timeline.spans]
        assert [timeline.makespan - time for time in busy] == list(timeline.idle)


def random_costs(rng: random.Random, stages: int, ranks: int) -> Costs:
    """Random costs: a table of pairs, uneven stages (sometimes by kind), uneven ranks, latency."""
    F, I, W = (Fraction(rng.randint(1, 9), rng.choice((1, 3))) for _ in range(3))
    costs = Costs(F, I, W, rng.choice((None, Fraction(rng.randint(1, 9)))))
    kinds = [pair for pair in PAIR_KINDS if rng.random() < 0.5]
    pairs = tuple(
        (pair, (costs.lone_time(pair[0]) + costs.lone_time(pair[1])) * Fraction(rng.randint(2, 8), 7)) for pair in kinds
    )
    return replace(
        costs,
        pairs=pairs,
        latency=Fraction(rng.randint(0, 2), 2),
        stages=random_weights(rng, stages),
        ranks=tuple(Fraction(rng.randint(2, 4), 3) for _ in range(ranks if rng.random() < 0.5 else 0)),
    )


def random_weights(rng: random.Random, stages: int) -> tuple[StageWeight, ...]:
    """None, or one weight a stage, for all kinds or by kind."""
    count, by_kind = rng.choice(((0, False), (0, False), (stages, False), (stages, True)))

    def factor() -> Fraction:
        return Fraction(rng.randint(2, 4), 3)

    return tuple(Weight.of_factors(factor() for _ in "FBIW") if by_kind else factor() for _ in range(count))


# ---------------------------------------------------------------- refusals


def test_a_circle_is_named() -> None:
    header = "# mine ranks=2 micro_batches=2 placement=bidirectional\n"
    schedule = Schedule.from_text(header + "F1.1 B1.1 F0.0 B0.0\nF1.0 B1.0 F0.1 B0.1\n")
    schedule.check()
    with pytest.raises(ScheduleError, match=r"rank 0, F1\.1: waits for ever"):
        simulate(schedule, Costs())


def test_weights_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="weights of 3 stages, but the schedule has 2"):
        simulate(SCHEDULES["1f1b"].generate(2, 2), Costs(stages=(Fraction(1),) * 3))


def test_a_message_to_the_own_rank_takes_no_time() -> None:
    """The bottom of a V, and a pipeline of one rank."""
    assert simulate(SCHEDULES["interleaved"].generate(1, 1), Costs(latency=Fraction(5))).makespan == 2 + 4
    V = "# v ranks=2 micro_batches=1 placement=v\nF0.0 F3.0 B3.0 B0.0\nF1.0 F2.0 B2.0 B1.0\n"
    assert simulate(Schedule.from_text(V), Costs(latency=Fraction(5))).makespan == 4 + 8 + 4 * 5


def test_activations_live_from_f_to_b_or_w() -> None:
    text = "# mine ranks=1 micro_batches=3 placement=loop(1)\nF0.0 I0.0 F0.1 W0.0 (F0.2|B0.1) B0.2\n"
    assert peak_activations(Schedule.from_text(text)) == (2,)


def test_a_large_schedule_takes_little_memory() -> None:
    """A command that handles a schedule needs about 300 bytes per step at its peak, including the actions."""
    program = (
        "import re; from compiler.schedule.costs import Costs; from compiler.schedule.simulate import simulate;"
        "from compiler.schedule.zero_bubble import zbv; schedule = zbv(64, 512); schedule.check();"
        "timeline = simulate(schedule, Costs()); assert timeline.makespan and max(timeline.idle) >= 0;"
        # not getrusage: Linux counts what the parent held when it forked
        r"most = int(re.search(r'VmHWM:\s*(\d+)', open('/proc/self/status').read())[1]) * 1024;"
        "print(most, sum(map(len, timeline.ends)))"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    peak, steps = map(int, completed.stdout.split())
    assert steps == 6 * 64 * 512 and peak < 330 * steps + 40 * 2**20

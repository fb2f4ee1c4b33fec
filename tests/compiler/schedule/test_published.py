"""The schedules against published makespans, peaks and formulas, and what the simulator refuses."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.schedule.costs import Costs
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.one_f_one_b import forward_only, one_f_one_b
from compiler.schedule.schedule import Schedule, ScheduleError
from compiler.schedule.simulate import simulate
from runtime.contract.actions import actions_of


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "pair", "makespan"),
    [
        (8, 20, Fraction(3), 66),
        (8, 20, Fraction(5, 2), 59),
        (8, 20, Fraction(2), 52),
        (4, 8, Fraction(3), 26),
        (16, 64, Fraction(3), 206),
    ],
)
def test_published_makespans(ranks: int, micro_batches: int, pair: Fraction, makespan: int) -> None:
    assert simulate(dualpipe(ranks, micro_batches), Costs(pairs=(("BF", pair),))).makespan == makespan


def test_published_idle_time() -> None:
    assert simulate(dualpipe(8, 20), Costs()).idle == (6,) * 8


@pytest.mark.parametrize("ranks", range(2, 18, 2))
@pytest.mark.parametrize("extra", [0, 2, 14])
def test_every_size_of_dualpipe(ranks: int, extra: int) -> None:
    """Legal, alive, P+1 activations, and the bubble (P/2-1)(F&B + B - 3W), exact where I = F, W <= I, F&B = F + B."""
    schedule = dualpipe(ranks, 2 * ranks + extra)
    schedule.check()
    for weight in (Fraction(1), Fraction(1, 2), Fraction(3, 7)):
        costs = Costs(W=weight)
        timeline = simulate(schedule, costs)
        backward = 1 + weight
        assert timeline.peak_activations == (ranks + 1,) * ranks
        assert set(timeline.idle) == {(Fraction(ranks, 2) - 1) * (1 + backward + backward - 3 * weight)}


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_mirrored_ranks_do_the_same(ranks: int) -> None:
    """Rank P-1-r runs the actions of rank r, with the other half of the micro-batches."""
    half = 2 * ranks
    schedule = dualpipe(ranks, 2 * half)

    def mirrored(text: str) -> str:
        name, micro_batch = text.split(".")
        return f"{name}.{(int(micro_batch) + half) % (2 * half)}"

    for rank in range(ranks):
        steps = [str(step).strip("()").split("|") for step in schedule.actions[rank]]
        mirror_steps = [str(step).strip("()").split("|") for step in schedule.actions[ranks - 1 - rank]]
        assert [[mirrored(text) for text in step] for step in steps] == mirror_steps


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7, 16])
def test_every_size_of_one_f_one_b(ranks: int, micro_batches: int) -> None:
    schedule = one_f_one_b(ranks, micro_batches)
    schedule.check()
    timeline = simulate(schedule, Costs(B=Fraction(1)))
    assert timeline.makespan == 2 * (micro_batches + ranks - 1)
    assert timeline.peak_activations == tuple(min(micro_batches, ranks - rank) for rank in range(ranks))


@pytest.mark.parametrize("placement", [BIDIRECTIONAL, V, loop(1), loop(2), loop(3)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12])
def test_forward_only(placement: StagePlacement, ranks: int, micro_batches: int) -> None:
    schedule = forward_only(placement, ranks, micro_batches)
    schedule.check()
    makespan = simulate(schedule, Costs()).makespan
    if placement == loop(1):
        assert makespan == micro_batches + ranks - 1
    if placement == BIDIRECTIONAL:
        assert makespan == ranks + 2 * ((micro_batches + 1) // 2 - 1)
    if placement == V:
        assert makespan == 2 * ranks + 2 * (micro_batches - 1)


def own_order_breaks(schedule: Schedule) -> list[tuple[str, str, str]]:
    """(edge, message sent, message awaited) where a receiver's own order first differs from its sender's.

    A step receives before it runs and sends when it has run; of a pair, the forward's message goes first.
    """
    sent: dict[tuple[int, int], list[str]] = {}
    awaited: dict[tuple[int, int], list[str]] = {}
    last = schedule.num_stages - 1

    def at(stage: int, micro_batch: int) -> int:
        return schedule.rank_of(stage, micro_batch)

    for rank, steps in enumerate(schedule.actions):
        for kind, stage, k in [(a.kind, a.stage, a.micro_batch) for step in steps for a in actions_of(step)]:
            forward = kind == "F"
            after, before = (stage + 1, stage - 1) if forward else (stage - 1, stage + 1)
            name = "F" if forward else "B"
            if kind != "W" and 0 <= after <= last:
                sent.setdefault((rank, at(after, k)), []).append(f"{name}{stage}.{k}")
            if kind != "W" and 0 <= before <= last:
                awaited.setdefault((at(before, k), rank), []).append(f"{name}{before}.{k}")
    assert {edge: sorted(messages) for edge, messages in sent.items()} == {
        edge: sorted(messages) for edge, messages in awaited.items()
    }
    pairs = ((edge, s, r) for edge in sorted(sent) for s, r in zip(sent[edge], awaited[edge], strict=True) if s != r)
    return [(f"{edge[0]}→{edge[1]}", s, r) for edge, s, r in pairs]


@pytest.mark.parametrize("ranks", range(2, 18, 2))
def test_receiving_in_own_order_can_deadlock(ranks: int) -> None:
    """Why receives are posted in the sender's order: FIFO breaks for every P >= 6, first at P = 6 on edge 0→1."""
    breaks = [own_order_breaks(dualpipe(ranks, 2 * ranks + extra)) for extra in (0, 2, 8)]
    assert all(breaks) if ranks >= 6 else not any(breaks)
    if ranks == 6:
        assert breaks[0][0] == ("0→1", "F0.4", "B5.6")


def test_latency_and_pairs_count() -> None:
    """Two ranks, one micro-batch: F, hop, F, B, hop, B."""
    costs = Costs(F=Fraction(3), B=Fraction(5), latency=Fraction(1, 2))
    timeline = simulate(one_f_one_b(2, 1), costs)
    assert timeline.makespan == 3 + 3 + 5 + 5 + 1
    assert timeline.spans[1] == ((Fraction(7, 2), Fraction(13, 2)), (Fraction(13, 2), Fraction(23, 2)))


def test_a_circle_is_named() -> None:
    """Rank 0 expects the backward of micro-batch 1 first; rank 1 sends that of 0 first and then waits for rank 0."""
    text = "# x ranks=2 micro_batches=2 placement=loop(1)\nF0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1\n"
    schedule = Schedule.from_text(text)
    schedule.check()
    with pytest.raises(ScheduleError, match=r"rank 0, B0\.0: waits for ever"):
        simulate(schedule, Costs())


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "message"),
    [
        (7, 20, "even number of ranks, got 7: use 6 or 8"),
        (1, 20, "at least 2 ranks"),
        (0, 0, "at least 2 ranks"),
        (8, 14, "at least 16 micro-batches, got 14: use 16"),
        (8, 17, "even number of micro-batches, got 17: use 16 or 18"),
    ],
)
def test_sizes_that_dualpipe_refuses(ranks: int, micro_batches: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dualpipe(ranks, micro_batches)


def test_sizes_that_other_schedules_refuse() -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        one_f_one_b(0, 1)
    with pytest.raises(ValueError, match="at least 1 micro-batch"):
        forward_only(V, 2, 0)


def test_makespan_shrinks_with_the_pair() -> None:
    """A pair takes the time in its table: pairs of the steady state dominate a long run."""
    long = dualpipe(4, 200)
    slow, fast = (simulate(long, Costs(pairs=(("BF", Fraction(pair)),))) for pair in (3, 2))
    assert slow.makespan - fast.makespan > 180
    assert simulate(long, dataclasses.replace(Costs(), B=Fraction(2))).makespan == slow.makespan

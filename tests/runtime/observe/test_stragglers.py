"""A slow rank is found soon and named; noise, unequal experts and unequal stages are not taken for one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

import pytest

from runtime.contract import Mesh
from runtime.observe.health import stragglers
from runtime.observe.health.stragglers import RankSeconds, Straggler, Stragglers, peers_of
from tests.runtime.observe.noisy_ranks import BUSY, QUIET, SHARED, Noise, NoisyRanks, Slowdown


def mesh(pp: int, dp: int, tp: int = 1, cp: int = 1) -> Mesh:
    return Mesh(pp=pp, dp=dp, ep=1, tp=tp, cp=cp)


WITH_PEERS = (*(mesh(1, dp) for dp in (2, 4, 8, 16)), mesh(2, 2), mesh(2, 4), mesh(4, 2), mesh(2, 8), mesh(4, 4))
WITH_PEERS += (mesh(1, 4, cp=2), mesh(1, 2, tp=2))
PIPELINES = (mesh(2, 1), mesh(4, 1))
MESHES = WITH_PEERS + PIPELINES
NOISES = {"quiet": QUIET, "shared": SHARED, "busy": BUSY}
Found = tuple[int, Straggler, bool]  # the number of rows so far, and what changed


def follow(ranks: Mesh, rows: Iterable[Sequence[RankSeconds]]) -> list[Found]:
    watched = Stragglers(peers_of(ranks))
    return [(step, *change) for step, row in enumerate(rows, 1) for change in watched.after(step, row)]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("part", range(6))
def test_noise_alone_is_never_reported(part: int, noise: str, record_property: Callable[[str, object], None]) -> None:
    """300 runs of 150 rows for each noise."""
    for seed in range(50 * part, 50 * part + 50):
        ranks = MESHES[seed % len(MESHES)]
        assert not follow(ranks, NoisyRanks(ranks, NOISES[noise], random.Random(seed)).rows(150)), seed
    record_property("runs_without", 50)


@pytest.mark.parametrize(
    ("noise", "shares"), [("quiet", (0.97, 1, 1)), ("shared", (0.8, 0.95, 1)), ("busy", (0.2, 0.5, 0.8))]
)
@pytest.mark.parametrize("first", [0, 60])
def test_a_rank_that_takes_thirty_percent_longer_is_found(
    first: int, noise: str, shares: tuple[float, ...], record_property: Callable[[str, object], None]
) -> None:
    """`shares` of 100 runs in which it is found within 20, 40 and 80 rows. No other rank is reported."""
    waits = []
    for seed in range(1000, 1100):
        meshes = MESHES if first else WITH_PEERS
        draw, ranks = random.Random(seed), meshes[seed % len(meshes)]
        slow = Slowdown(draw.randrange(ranks.world), 1.3, first)
        found = follow(ranks, NoisyRanks(ranks, NOISES[noise], draw, [slow]).rows(first + 80))
        assert {straggler.rank for _, straggler, _ in found} <= {slow.rank}, seed
        assert {straggler.part for _, straggler, _ in found} <= {"compute"}
        waits.append(found[0][0] - first if found else 1000)
        if found and noise == "quiet":
            assert found[0][1].factor == pytest.approx(1.3, abs=0.1)
            assert first - 4 <= found[0][1].since <= found[0][0]
    measured = [sum(wait <= rows for wait in waits) / len(waits) for rows in (20, 40, 80)]
    assert all(share >= least for share, least in zip(measured, shares, strict=True)), measured
    if noise == "quiet":
        record_property("quiet_runs", sum(wait <= 20 for wait in waits))
        record_property("quiet_of", len(waits))


@pytest.mark.parametrize("factor", [1.3, 3.0])
def test_a_rank_that_recovers_is_reported_once_and_then_as_over(factor: float) -> None:
    for seed in range(30):
        slow = Slowdown(seed % 4, factor, 40, 90)
        found = follow(mesh(1, 4), NoisyRanks(mesh(1, 4), QUIET, random.Random(seed), [slow]).rows(160))
        assert [(straggler.rank, began) for _, straggler, began in found] == [(slow.rank, True), (slow.rank, False)]
        assert 90 < found[1][0] <= 110


@pytest.mark.parametrize("part", ["compute", "data", "message"])
def test_the_part_that_takes_long_is_named(part: str) -> None:
    """A slow device is not taken for a slow link, although other ranks wait long for its messages, and the reverse."""
    for seed in range(30):
        ranks = mesh(2, 4)
        slow = Slowdown(seed % 8, 1.5, 30, part=part)
        found = follow(ranks, NoisyRanks(ranks, QUIET, random.Random(seed), [slow]).rows(90))
        assert [(straggler.rank, straggler.part) for _, straggler, _ in found] == [(slow.rank, part)], seed
        assert f"rank {slow.rank} on host7" in found[0][1].text("host7")
        assert ("link" in found[0][1].text("host7")) == (part == "message")


def test_a_pipeline_without_replicas_shows_changes_alone() -> None:
    """Its stages have unequal work, so only a rank that becomes slower than before is a straggler."""
    for seed in range(20):
        for ranks in PIPELINES:
            slow = Slowdown(seed % ranks.world, 1.5, 0)
            assert not follow(ranks, NoisyRanks(ranks, QUIET, random.Random(seed), [slow]).rows(150))
            later = replace(slow, first=60)
            found = follow(ranks, NoisyRanks(ranks, QUIET, random.Random(seed), [later]).rows(90))
            assert [straggler.rank for _, straggler, _ in found] == [slow.rank]


def loaded(rows: Iterable[list[RankSeconds]], rank: int, load: float) -> Iterable[list[RankSeconds]]:
    """Return the rows for ranks whose experts get `load` times the rows of others, and take all their time."""
    for row in rows:
        works = [replace(work, expert_rows=1000) for work in row]
        more_s = (load - 1) * works[rank].compute_s
        works[rank] = replace(works[rank], expert_rows=round(1000 * load), compute_s=works[rank].compute_s + more_s)
        yield works


@pytest.mark.parametrize("load", [0.5, 1.3, 3.0])
def test_busy_experts_are_not_a_slow_device(load: float) -> None:
    for seed in range(20):
        ranks = WITH_PEERS[seed % 9]
        assert not follow(ranks, loaded(NoisyRanks(ranks, QUIET, random.Random(seed)).rows(100), 1, load))


def test_a_slow_device_with_busy_experts_is_found() -> None:
    for seed in range(20):
        noisy = NoisyRanks(mesh(1, 4), QUIET, random.Random(seed), [Slowdown(1, 1.3, 30)])
        found = follow(mesh(1, 4), loaded(noisy.rows(60), 1, 2.0))
        assert [straggler.rank for _, straggler, _ in found] == [1]
        assert found[0][1].factor == pytest.approx(1.3, abs=0.05), "beyond its load"


def test_short_steps_are_judged_together() -> None:
    """A system that runs one process twice as often as another for 50 ms is no reason to report it."""

    def rows() -> Iterable[list[RankSeconds]]:
        for row in range(2000):
            slow = row // 20 % 2  # for 20 steps of at least 2.5 ms
            yield [RankSeconds(0.0025 * (1 + (rank == slow)), 0, 0, 0, 0.005) for rank in range(2)]

    assert not follow(mesh(1, 2), rows())
    found = follow(mesh(1, 2), NoisyRanks(mesh(1, 2), QUIET, random.Random(1), [Slowdown(1, 1.3)], 0.01).rows(400))
    assert [straggler.rank for _, straggler, _ in found] == [1] and found[0][0] > 60


def test_a_single_rank_and_an_idle_one_are_no_stragglers() -> None:
    assert not follow(mesh(1, 1), NoisyRanks(mesh(1, 1), BUSY, random.Random(1)).rows(50))
    assert not follow(mesh(1, 2), ([RankSeconds(0, 0, 0, 0, 1)] * 2 for _ in range(50)))


def test_the_median_of_the_others() -> None:
    draw = random.Random(1)
    for size in range(2, 12):
        values = [float(draw.randrange(5)) for _ in range(size)]
        expected = [median(values[:index] + values[index + 1 :]) for index in range(size)]
        assert stragglers._medians_of_others(values) == expected


def test_peers_have_a_pipeline_rank_and_a_part_of_sequences_in_common() -> None:
    assert peers_of(mesh(2, 3)) == [(0, 1, 2), (3, 4, 5)]
    assert peers_of(mesh(1, 2, tp=2, cp=2)) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert peers_of(mesh(3, 1)) == [(0,), (1,), (2,)]


def test_the_tests_would_notice_a_rule_without_noise() -> None:
    """A limit on the median alone reports ranks of a noisy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers, "SAMPLE_ERRORS", 0.0)
        patch.setattr(stragglers, "BLOCK_ERRORS", 0.0)
        patch.setattr(stragglers, "AGREEING", 0.5)
        patch.setattr(stragglers, "LIMIT", 0.03)
        patch.setattr(stragglers, "HALF", 0.0)
        assert follow(mesh(1, 4), NoisyRanks(mesh(1, 4), Noise(0.11, 0.06), random.Random(1)).rows(150))

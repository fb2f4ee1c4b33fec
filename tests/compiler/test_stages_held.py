"""What the ranks hold under each stage placement: the ends of the model, and the embedding and head that MTP shares."""

from __future__ import annotations

import pytest

from compiler.emit.build_files import layers_of
from compiler.ir import Plan, Replica, Use
from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.plan.plan import make_plan
from dsl.schema import Dense, LayerRange, ScheduleBlock, Spec
from tests.runtime.step.specs import spec

RANKS = 4
SCHEDULES = [  # schedule, placement, ranks of the first stage, ranks of the last one
    (ScheduleBlock(name="gpipe"), loop(1), (0,), (3,)),
    (ScheduleBlock(name="1f1b"), loop(1), (0,), (3,)),
    (ScheduleBlock(name="zb1p"), loop(1), (0,), (3,)),
    (ScheduleBlock(name="interleaved"), loop(2), (0,), (3,)),
    (ScheduleBlock(name="interleaved", chunks=3), loop(3), (0,), (3,)),
    (ScheduleBlock(name="zbv"), V, (0,), (0,)),
    (ScheduleBlock(name="dualpipev"), V, (0,), (0,)),
    (ScheduleBlock(name="dualpipe"), BIDIRECTIONAL, (0, 3), (0, 3)),
    (ScheduleBlock(name="auto"), BIDIRECTIONAL, (0, 3), (0, 3)),
]


def planned(schedule: ScheduleBlock, of: str, dp: int = 2) -> tuple[Spec, Plan]:
    """Sixteen layers on four pipeline ranks."""
    small = spec(RANKS, 1, dp, 2 * RANKS, of=of)
    layers = tuple(LayerRange(first=i, last=i, ffn=Dense(inner=16)) for i in range(15))
    last = small.model.layers[-1].model_copy(update={"first": 15, "last": 15})
    model = small.model.model_copy(update={"layers": (*layers, last)})
    small = small.model_copy(update={"schedule": schedule, "model": model})
    return small, make_plan(small)


def pipeline_ranks(plan: Plan, replica: Replica) -> tuple[int, ...]:
    return tuple(sorted({plan.mesh.coordinates(rank).pp_rank for rank in replica.holders}))


def stages_with(plan: Plan, tensor: str) -> set[int]:
    return {
        stage.index
        for stage in plan.stages
        for step in stage.steps
        if isinstance(step, Use) and tensor in dict(step.params).values()
    }


@pytest.mark.parametrize(("schedule", "placement", "firsts", "lasts"), SCHEDULES)
@pytest.mark.parametrize("of", ["v3", "llama"])  # with and without MTP
def test_the_ends_of_the_model(
    schedule: ScheduleBlock, placement: StagePlacement, firsts: tuple[int, ...], lasts: tuple[int, ...], of: str
) -> None:
    """The embedding is on the ranks of the first stage, the head on those of the last; with MTP the embedding is on
    both, once a rank."""
    small, plan = planned(schedule, of)
    assert plan.stage_placement == placement
    assert len(plan.stages) == placement.num_stages(RANKS)
    last = len(plan.stages) - 1
    assert placement.ranks_of_stage(RANKS, 0) == firsts
    assert tuple(sorted(placement.ranks_of_stage(RANKS, last))) == lasts
    rows = {replica.name: replica for replica in plan.replicas}
    tied = small.model.mtp is not None
    assert stages_with(plan, "embedding") == ({0, last} if tied else {0})
    assert stages_with(plan, "head") == {last}
    shared = tuple(sorted({*firsts, *(lasts if tied else ())}))
    assert pipeline_ranks(plan, rows["embedding"]) == shared
    assert pipeline_ranks(plan, rows["head"]) == lasts
    for name, row in rows.items():
        assert len(set(row.holders)) == len(row.holders), f"{name} has one copy on a rank"
        if name.startswith("mtp."):
            assert pipeline_ranks(plan, row) == lasts


@pytest.mark.parametrize(("schedule", "placement", "firsts", "lasts"), SCHEDULES)
def test_each_gradient_is_reduced_over_exactly_its_copies(
    schedule: ScheduleBlock, placement: StagePlacement, firsts: tuple[int, ...], lasts: tuple[int, ...]
) -> None:
    """A parameter is held by every data rank of each pipeline rank that holds a stage that reads it; its bucket, the
    group that sums its gradient, has these holders."""
    _, plan = planned(schedule, "v3")
    stages = {rank: {*placement.stages_of(RANKS, rank)} for rank in range(RANKS)}
    holders = {name: bucket.holders for bucket in plan.buckets for name in bucket.replicas}
    for replica in plan.replicas:
        readers = stages_with(plan, replica.tensor)
        assert readers, f"{replica.tensor} is read"
        wanted = [rank for rank in range(RANKS) if stages[rank] & readers]
        assert tuple(replica.holders) == tuple(plan.mesh.rank(p, d) for p in wanted for d in range(plan.mesh.dp))
        if replica.role == "parameter":
            assert holders[replica.name] == replica.holders


@pytest.mark.parametrize(("schedule", "placement", "firsts", "lasts"), SCHEDULES)
def test_stages_follow_the_model(
    schedule: ScheduleBlock, placement: StagePlacement, firsts: tuple[int, ...], lasts: tuple[int, ...]
) -> None:
    """The layers in order, each once; tokens are loaded by the first stage, targets and MTP's tokens by the last."""
    _, plan = planned(schedule, "v3")
    sites = [step.site for stage in plan.stages for step in stage.steps if isinstance(step, Use)]
    assert len(set(sites)) == len(sites)
    layers = [int(site[1:].partition(".")[0]) for site in sites if site.startswith("L") and site.endswith(".attention")]
    assert layers == list(range(16))
    loads = [{buffer.name for buffer in stage.loads} for stage in plan.stages]
    assert loads[0] == {"tokens"} and loads[-1] == {"targets", "mtp_tokens", "mtp_targets"}
    assert not any(loads[1:-1])


def test_a_v_keeps_one_copy_and_dualpipe_two() -> None:
    """A V has one copy of every parameter, also of the embedding, which its first and last stage read on one rank."""
    (_, mirrored), (_, folded), (_, plain) = (
        planned(ScheduleBlock(name=name), "v3") for name in ("dualpipe", "dualpipev", "1f1b")
    )
    copies = [{row.name: len(pipeline_ranks(plan, row)) for row in plan.replicas} for plan in (mirrored, folded, plain)]
    assert set(copies[0].values()) == {2}
    assert set(copies[1].values()) == {1}
    assert {name for name, count in copies[2].items() if count == 2} == {"embedding"}


def test_contents_of_a_stage_are_listed_in_order() -> None:
    _, plan = planned(ScheduleBlock(name="interleaved"), "v3")
    words = [layers_of(stage) for stage in plan.stages]
    runs = [word for stage_words in words for word in stage_words if word.startswith("layer")]
    assert (words[0][0], words[-1][-3:]) == ("embed", ["final_norm", "head", "mtp"])
    assert len(runs) == sum(map(len, words)) - 4 == len(words), "a stage has one run of layers"
    ends = [[int(layer) for layer in run.split(" ")[1].split("–")] for run in runs]
    assert [layer for run in ends for layer in range(run[0], run[-1] + 1)] == list(range(16))
    assert [run.startswith("layers ") for run in runs] == [len(run) > 1 for run in ends]

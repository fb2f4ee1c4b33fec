"""Re-checks what was proven of the world as a whole: the collectives of every program, and the start-up. No torch.

A program has one list of collectives for all ranks, of which a rank leaves out the buckets that it does not hold: any
two ranks come to those that they share in one order, so none can hang. What is left to look at is that the list is that
of the plan: nothing that it needs is missing, runs twice or runs in another place.

So it is with the channels: all ranks open those that they are in, in the order of one list. It must have every channel
that a program uses, once: one that it lacks would be opened in the middle of a step, where it may hold both of its ends
for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from runtime.build.certificate import CertificateError
from runtime.contract import Collective, Opening, Plan, Program
from runtime.contract.mesh import Columns

TARGETS, RECORDS, NORM = (Collective("sum", name) for name in ("targets", "records", "norm"))
LOGITS = Collective("max", "logits")


def check_collectives(plan: Plan, programs: Mapping[str, Program]) -> None:
    """Raise CertificateError unless every program has the collectives that its plan needs. O(buckets) of each."""
    shared = [bucket for bucket in plan.buckets if len(bucket.holders) > 1 and not bucket.still]
    alike = [bucket for bucket in shared if plan.is_reduced(bucket)]
    reduces = {Collective("reduce", bucket.name) for bucket in alike}
    parted = {0: [], 3: alike}.get(plan.zero, shared)
    gathers = {Collective("gather", bucket.name) for bucket in parted}
    groups = {(_pipeline_ranks(plan, bucket.holders), bucket.stages) for bucket in alike}
    averaged = plan.train.validate is not None and plan.train.validate.ema
    of_training = {RECORDS, NORM, *reduces, *((LOGITS,) if plan.clipped else ())}
    for name, program in programs.items():
        trains = name.startswith("train_")
        lists = {
            "prologue": (program.prologue, {TARGETS}),
            "epilogue": (program.epilogue, of_training if trains else {RECORDS}),
            "update": (program.update, gathers if trains or averaged else set()),
        }
        for place, (given, wanted) in lists.items():
            if len(given) != len(wanted) or set(given) != wanted:
                raise CertificateError(f"program/{name}.json: its {place} is not that of the plan's buckets")
        if trains and program.epilogue[-1] != NORM:
            raise CertificateError(f"program/{name}.json: the norm is summed before all gradients are")
        if problem := _wrong_starts(program, groups if trains else set()):
            raise CertificateError(f"program/{name}.json: {problem}")


def _pipeline_ranks(plan: Plan, holders: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({holder // plan.mesh.columns for holder in holders}))


def _wrong_starts(program: Program, shared: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """What is wrong with the starts of reductions, or "": each rank starts those that it is in once, behind the last
    weight gradient of their stages, and all ranks of a channel start them in one order.

    `shared`: the pipeline ranks and stages of each reduction of the program.
    """
    if shared and len(program.reductions) != len(program.ranks):
        return "its reductions are not those of its ranks"
    for rank, (row, calls) in enumerate(zip(program.reductions, program.ranks, strict=False)):
        if sorted(each.stages for each in row) != sorted(stages for ranks, stages in shared if rank in ranks):
            return f"the reductions that rank {rank} starts are not those of the plan's buckets"
        after = [each.after for each in row]
        if after != sorted(after) or any(at >= len(calls) for at in after):
            return f"the reductions of rank {rank} are not behind its calls in their order"
        for at in range(min(after, default=len(calls)) + 1, len(calls)):
            added = {int(action[1:]) for action in calls[at].body.split("_") if action[0] in "BW"}
            if any(each.after < at and not added.isdisjoint(each.stages) for each in row):
                return f"rank {rank} starts a reduction before {calls[at].label}, which adds to it"
    for ranks in {ranks for ranks, _ in shared}:
        if len({tuple(r.stages for r in program.reductions[k] if (ranks, r.stages) in shared) for k in ranks}) > 1:
            return f"ranks {', '.join(map(str, ranks))} start reductions in several orders"
    return ""


def check_start(plan: Plan, programs: Mapping[str, Program]) -> None:
    """Raise CertificateError unless all channels that programs use are opened once, and no others. O(messages)."""
    used, given = Counter({*_used(plan, programs)}), Counter(plan.openings)
    for opening in (*used, *given):
        if used[opening] != given[opening]:
            ranks = ", ".join(map(str, opening.ranks))
            raise CertificateError(
                f"plan.json: the channels `{opening.kind}` of pipeline ranks {ranks} are opened {given[opening]} times"
                f" instead of {used[opening]}"
            )


def _used(plan: Plan, programs: Mapping[str, Program]) -> Iterator[Opening]:
    mesh = plan.mesh
    rows = [(rank, calls) for program in programs.values() for rank, calls in enumerate(program.ranks)]
    for source, rank in {(source, rank) for rank, calls in rows for call in calls for source, _ in call.posts}:
        yield Opening("edge", (source, rank), "each")
    if mesh.expert_group > 1:
        for rank in range(mesh.pp):
            if not mesh.node:
                yield from (Opening("expert", (rank,), "block"), Opening("counts", (rank,), "block"))
                continue
            yield from (Opening("expert", (rank,), "across"), Opening("counts", (rank,), "across"))
            if mesh.node > 1:
                yield from (Opening("expert", (rank,), "node"), Opening("counts", (rank,), "node"))
    if mesh.tp > 1:
        yield from (Opening("tensor", (rank,), "tensor") for rank in range(mesh.pp))
    if mesh.cp > 1:
        yield from (Opening("context", (rank,), "context") for rank in range(mesh.pp))
    if mesh.sq > 1:
        yield from (Opening("choices", (rank,), "sequence") for rank in range(mesh.pp))
    for bucket in plan.buckets:
        if len(bucket.holders) > 1 and not bucket.still:
            ranks = _pipeline_ranks(plan, bucket.holders)
            held = len(bucket.holders) // len(ranks)
            slices = mesh.tp > 1 and held * mesh.tp == mesh.columns
            columns: Columns = "slice" if slices else "member"
            if held in (1, mesh.columns):
                columns = "each" if held < mesh.columns else "all"
            elif bucket.holders[1] - bucket.holders[0] == 1:
                columns = "experts"
            opening = Opening("reduce", ranks, columns)
            if opening.channel_of(mesh, bucket.holders[0]) != bucket.holders:
                raise CertificateError(f"plan.json: bucket {bucket.name} has holders that no channel has")
            if not bucket.sites:
                yield opening
                continue
            yield from (Opening("reduce", (rank,), columns) for rank in ranks)
            if len(ranks) > 1:
                yield Opening("reduce", ranks, "each")
                yield from [opening] if plan.zero == 2 else []
    if mesh.world > 1:
        yield Opening("world", tuple(range(mesh.pp)), "all")

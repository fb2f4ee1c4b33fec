"""The passes over the plan, its collectives and its start-up: holders, sums and channels are complete."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence

from compiler.ir import Bucket, Collective, Param, Plan, Program, Reduction, Replica, Use
from compiler.ir.holders import Columns, Holders
from compiler.program.lower.lowering import LOGITS, NORM, RECORDS, TARGETS
from compiler.program.proof.structure import ProofError
from runtime.contract import Opening
from runtime.contract.slices import tiling_problem

# --- Fourth pass, over the plan: whoever computes a part of a gradient holds the parameter, and is in its one bucket
#
# A bucket names the stages that use its parameters, all of them and no others.


def check_holders(plan: Plan) -> None:
    """Raise ProofError unless every parameter is held where it is used, and is in one bucket of its holders."""
    stages, params = _stages(plan)
    uses = {tensor: _ranks_of(plan, each) for tensor, each in stages.items()}
    right: set[Hashable] = set()  # what experts of one rank have in common is looked at once
    for replica in plan.replicas:
        users, param = uses.get(replica.tensor, frozenset()), params.get(replica.tensor)
        every = plan.mesh.expert_group if param and param.stack else plan.mesh.tp if replica.slice else 1
        together = plan.mesh.etp if param and param.stack and not replica.slice else 1
        common = (replica.holders, users, every, together)
        if common not in right:
            _check_holders(plan, replica, users, every, together)
            right.add(common)
    _check_slices(plan, params)
    _check_buckets(plan, stages)
    _check_divided(plan)


def _stages(plan: Plan) -> tuple[dict[str, frozenset[int]], dict[str, Param]]:
    """Tensor -> the stages that use it, and what a segment takes of it."""
    stages: dict[str, set[int]] = {}
    params: dict[str, Param] = {}
    for stage in plan.stages:
        for use in stage.steps:
            if isinstance(use, Use):
                for local, tensor in use.params:
                    stages.setdefault(tensor, set()).add(stage.index)
                    params[tensor] = next(p for p in use.segment.params if p.name == local)
    return {tensor: frozenset(each) for tensor, each in stages.items()}, params


def _ranks_of(plan: Plan, stages: frozenset[int]) -> frozenset[int]:
    """The pipeline ranks that store one of some stages."""
    return frozenset(rank for rank in range(plan.mesh.pp) if not stages.isdisjoint(plan.stages_of(rank)))


def _check_holders(plan: Plan, replica: Replica, users: frozenset[int], every: int, together: int) -> None:
    """All columns of every pipeline rank that uses the tensor; of an expert or a slice, one in each of its groups, or
    so many together: those that have the slices of an expert."""
    width = plan.mesh.columns
    expected = Counter({rank: width // every * together for rank in users})
    holders = list(replica.holders)  # of thousands of ranks: what follows is mesh.coordinates of each
    given = Counter([holder // width for holder in holders])
    coordinates = {holder % width % every // together for holder in holders}
    if len({*holders}) < len(holders) or given != expected or len(coordinates) > 1:
        raise ProofError(
            f"reduce {replica.key}: held by ranks {list(replica.holders)}, but used on pipeline ranks {sorted(users)}"
        )


def _check_slices(plan: Plan, params: Mapping[str, Param]) -> None:
    """The slices of a parameter are all of it. Neighbouring columns have them, each the one that segments take there:
    what one product gives is what the next one reads."""
    table: dict[str, list[Replica]] = defaultdict(list)
    for replica in plan.replicas:
        table[replica.name].append(replica)
    for name, rows in table.items():
        first = rows[0]
        if problem := tiling_problem(first.shape, [row.slice for row in rows]):
            raise ProofError(f"hold {name}: {problem}")
        split = params[first.tensor].split if first.tensor in params else None
        if split is None and first.slice is None:
            continue
        held = {row.holders.columns.start: (row.slice, row.shape) for row in rows}
        at, ranks = min(held), split.ranks if split else 0
        taken = {at + rank: (split.slice_of(rank), first.shape) for rank in range(ranks) if split}
        if len(held) < len(rows) or held != taken or at % ranks:
            raise ProofError(f"hold {name}: its slices are not those of the ranks that split it")


def _check_buckets(plan: Plan, stages: Mapping[str, frozenset[int]]) -> None:
    """Every trained parameter is in exactly one bucket, of holders and stages equal to its own, if it is shared."""
    buckets = [(name, bucket) for bucket in plan.buckets for name in bucket.replicas]
    counts = Counter(name for name, _ in buckets)
    replicas = {replica.key: replica for replica in plan.replicas}
    sorted_stages = {tensor: tuple(sorted(each)) for tensor, each in stages.items()}
    for replica in plan.replicas:
        held = replica.role in ("parameter", "still") and len(replica.holders) > 1
        wanted = 1 if held else counts[replica.key]
        if counts[replica.key] != min(wanted, 1):
            raise ProofError(f"reduce {replica.key}: it is in {counts[replica.key]} buckets")
    for name, bucket in buckets:
        found = replicas.get(name)
        if found is None or found.holders != bucket.holders:
            raise ProofError(f"reduce {name}: bucket {bucket.name} has other holders")
        if sorted_stages[found.tensor] != bucket.stages:
            raise ProofError(f"reduce {name}: bucket {bucket.name} is of other stages")
        if bucket.still != (found.role == "still"):
            raise ProofError(f"reduce {name}: bucket {bucket.name} has what is trained, and what is not")


def _check_divided(plan: Plan) -> None:
    """A bucket is divided if several ranks of a pipeline rank hold it. Every segment that reads it, and no other, puts
    it together, with the padding of equal parts for all holders."""
    readers: dict[str, set[str]] = defaultdict(set)
    for use in plan.uses:
        for _, tensor in use.params:
            readers[tensor].add(use.site)
    of = {replica.key: replica for replica in plan.replicas}
    sizes: dict[str, dict[Columns, int]] = defaultdict(dict)  # of the buckets of each site, by columns, with padding
    tensors: dict[str, set[str]] = defaultdict(set)
    for bucket in plan.buckets:
        members, count = [of[name] for name in bucket.replicas], len(bucket.holders)
        wanted = plan.zero >= 2 and len(bucket.holders.columns) > 1 and not bucket.still
        if bool(bucket.sites) != wanted or any(wanted and readers[each.tensor] != {*bucket.sites} for each in members):
            raise ProofError(f"scatter {bucket.name}: bucket is divided among segments {list(bucket.sites)}")
        for site in bucket.sites:
            padded = -(-sum(each.num_elements for each in members) // count) * count
            sizes[site][bucket.holders.columns] = sizes[site].get(bucket.holders.columns, 0) + padded
            tensors[site].update(each.tensor for each in members)
    if plan.sharded.keys() != sizes.keys():
        raise ProofError(f"scatter: segments {sorted(plan.sharded.keys() ^ sizes.keys())} put other tensors together")
    for site, here in plan.sharded.items():
        buffers = [here.gradients, *([here.weights] if here.weights else [])]
        held = {sum(size for columns, size in sizes[site].items() if each[0] in columns) for each in sizes[site]}
        shapes = {buffer.shape for buffer in buffers}
        if here.tensors != tensors[site] or shapes != {(size,) for size in held} or len(buffers) != plan.zero - 1:
            raise ProofError(f"scatter {site}: it puts other tensors together than its buckets have")


# --- Fifth pass, over collectives: each that the plan needs runs exactly once and in its place, and none can hang
#
# A program has one list of collectives for all ranks of the world, of which a rank leaves out the groups that it is not
# in. So any two ranks that are in the same groups come to them in the same order: of the collectives that are not over
# yet, all members of the first one come to it next. None waits beside a message: the lists begin before the first body
# and after the last send was taken.
#
# Reductions are started between the bodies, and a start waits for nobody: each rank comes to all of its own whatever
# the others do. All ranks of a channel start the same on it in the same order, so the sums meet their likes, and each
# starts when the last weight gradient of its stages has been added. What waits for them is in the epilogue.


def check_collectives(program: Program, plan: Plan, trains: bool) -> None:
    """Raise ProofError unless the collectives are those of the plan.

    Targets are counted before the first body, records are summed after the last one, and in training every gradient
    with several holders is reduced exactly once, before the norm is summed; weights of parts are gathered after it. Of
    logits that are clipped, the largest are found in training.
    Bodies scatter the gradients that are divided, and gather the weights that are: those are in no list, but for parts
    that several pipeline ranks have.
    """
    shared = [bucket for bucket in plan.buckets if len(bucket.holders) > 1 and not bucket.still]
    alike = [bucket for bucket in shared if not bucket.sites or len(bucket.holders.pipeline_ranks) > 1]
    reduces = [Collective("reduce", bucket.name, bucket) for bucket in alike if trains]
    parted = {0: [], 3: alike}.get(plan.zero, shared)
    gathers = [Collective("gather", bucket.name, bucket) for bucket in parted if trains or plan.averaged]
    logits = [LOGITS] if trains and plan.clips_logits else []
    norm = [NORM] if trains else []
    _check("before the first body", program.prologue, [TARGETS])
    _check("after the last body", program.epilogue, [RECORDS, *logits, *reduces, *norm])
    _check("with the update", program.update, gathers)
    if trains and program.epilogue[-1] != NORM:
        raise ProofError(f"{NORM}: runs before {program.epilogue[-1]}, whose gradients it needs")


def check_reductions(program: Program, plan: Plan, trains: bool) -> None:
    """Raise ProofError unless each rank starts each reduction that it is in once, not too early, in one common order.

    O(invocations), in practice of the last few of each rank.
    """
    shared = {(bucket.holders.pipeline_ranks, bucket.stages) for bucket in plan.buckets if trains and bucket.is_reduced}
    if len(program.reductions) != (len(program.invocations) if trains else 0):
        raise ProofError(f"{len(program.reductions)} ranks start reductions, of {len(program.invocations)}")
    for rank, row in enumerate(program.reductions):
        _check_starts(program, rank, {stages for ranks, stages in shared if rank in ranks}, row)
    for ranks in sorted({ranks for ranks, _ in shared}):
        orders = [[r.stages for r in program.reductions[rank] if (ranks, r.stages) in shared] for rank in ranks]
        for rank, order in zip(ranks, orders, strict=True):
            if order != orders[0]:
                raise ProofError(f"rank {rank}: starts reductions in another order than rank {ranks[0]} does")


def _check_starts(program: Program, rank: int, wanted: set[tuple[int, ...]], row: Sequence[Reduction]) -> None:
    """Raise ProofError unless a rank starts the wanted reductions once each, behind what they sum."""
    counts, invocations = Counter(each.stages for each in row), program.invocations[rank]
    for stages in sorted(wanted | counts.keys()):
        if counts[stages] != (stages in wanted):
            times = f"{counts[stages]} times instead of {int(stages in wanted)}"
            raise ProofError(f"rank {rank}, {Reduction(0, stages)}: started {times}")
    after = [each.after for each in row]
    if after != sorted(after) or any(not 0 <= at < len(invocations) for at in after):
        raise ProofError(f"rank {rank}: reductions are not behind its invocations in their order")
    adds = {body.name: {int(a[1:]) for a in body.actions if a[0] in "BW"} for body in program.bodies[rank]}
    for at in range(min(after, default=len(invocations)) + 1, len(invocations)):
        for each in row:
            if each.after < at and not adds[invocations[at].body].isdisjoint(each.stages):
                raise ProofError(f"rank {rank}, {each}: started before {invocations[at].body} adds to what it sums")


def _check(when: str, given: Sequence[Collective], wanted: Sequence[Collective]) -> None:
    """Raise ProofError unless the same are given as wanted, each once, in whatever order."""
    if len(given) == len(wanted) and all(a == b for a, b in zip(given, wanted, strict=True)):
        return
    expected, counts = Counter(wanted), Counter(given)
    for collective in (*expected, *counts):
        if expected[collective] != counts[collective]:
            times = f"{counts[collective]} times instead of {expected[collective]}"
            raise ProofError(f"{collective}: runs {times} {when}")


# --- Sixth pass, over start-up: every channel that the programs use is opened before the first step, and no rank hangs
#
# The model is that of a first use which holds the host of every rank of the channel until all have come, as NCCL makes
# a communicator. Rank lines are straight and name their channels, so one maximal run decides every interleaving, as in
# the second pass. Once all channels are open no first use is left, and the steps run as the second pass has proven
# them.
#
# Opening is by pipeline ranks: each data rank of one does the same at the same place of its line, and the channels of a
# row have no rank in common. So a row is a meeting of pipeline ranks.

Line = Sequence[Opening]  # what a pipeline rank opens, in its order


def check_start(plan: Plan, openings: Sequence[Opening], programs: Iterable[Program]) -> None:
    """Raise ProofError unless the openings are those that the programs of a plan need, and no rank hangs."""
    ranks = range(plan.mesh.pp)
    for opening in openings:
        if not opening.ranks or not set(opening.ranks) <= set(ranks):
            raise ProofError(f"{name_of(opening)}: there is no such rank")
    check_lines([[o for o in openings if rank in o.ranks] for rank in ranks], used(plan, programs))


def check_lines(lines: Sequence[Line], needed: Iterable[Opening]) -> None:
    """Raise ProofError unless each rank opens every channel that it needs once, and no other, and none waits for ever.

    `lines`: of each pipeline rank.
    """
    wanted = set(needed)
    for rank, line in enumerate(lines):
        expected, counts = {opening for opening in wanted if rank in opening.ranks}, Counter(line)
        for opening in sorted(expected | counts.keys()):
            if opening not in expected:
                raise ProofError(f"rank {rank}, {name_of(opening)}: nothing that it runs uses this channel")
            if counts[opening] != 1:
                raise ProofError(f"rank {rank}, {name_of(opening)}: opened {counts[opening]} times instead of once")
    _run(lines)


def used(plan: Plan, programs: Iterable[Program]) -> set[Opening]:
    """The channels that programs use: of messages, of exchanges, which every expert group has, and of collectives."""
    programs = list(programs)
    bodies = {(rank, id(b)): b for program in programs for rank, row in enumerate(program.bodies) for b in row}
    found: set[Opening] = set()
    for (rank, _), body in bodies.items():  # programs share most of them
        for _, i in body.messages:
            if i.peer != rank:
                found.add(Opening("edge", (rank, i.peer) if i.kind == "send" else (i.peer, rank), "each"))
    if plan.mesh.expert_group > 1:
        for rank in range(plan.mesh.pp):
            found |= _of_exchanges(plan, rank)
    if plan.mesh.tp > 1:
        found |= {Opening("tensor", (rank,), "tensor") for rank in range(plan.mesh.pp)}
    if plan.mesh.cp > 1:
        found |= {Opening("context", (rank,), "context") for rank in range(plan.mesh.pp)}
    if plan.mesh.sq > 1:
        found |= {Opening("choices", (rank,), "sequence") for rank in range(plan.mesh.pp)}
    calls = {(each.kind, id(each.bucket)): each.bucket for program in programs for each in program.collectives}
    several = {_meeting(plan, kind, bucket) if bucket else None for (kind, _), bucket in calls.items()}
    sites = {i.site for body in bodies.values() for i in body.instructions if i.kind in ("gather", "scatter")}
    for bucket in plan.buckets:
        if not sites.isdisjoint(bucket.sites):
            several |= {bucket.holders.on(rank) for rank in bucket.holders.pipeline_ranks}
    for holders in several:
        found |= _of_collective(plan, holders)
    return found


def _meeting(plan: Plan, kind: str, bucket: Bucket) -> Holders:
    """Who sums a bucket's gradients in the epilogue, or gathers its weights with the update: all of its holders, or the
    holders of the same part, as those of the first column are. Parts of weights are held at zero = 3 alone."""
    of_parts = bucket.sites and (kind == "reduce" or plan.zero == 3)
    return bucket.holders.at(bucket.holders.columns.start) if of_parts else bucket.holders


def _of_exchanges(plan: Plan, rank: int) -> set[Opening]:
    """The channels of rows and counts: of whole expert groups, or of those that tokens go through, a node's last."""
    if not plan.mesh.node:
        return {Opening("expert", (rank,), "block"), Opening("counts", (rank,), "block")}
    found = {Opening("expert", (rank,), "across"), Opening("counts", (rank,), "across")}
    if plan.mesh.node > 1:
        found |= {Opening("expert", (rank,), "node"), Opening("counts", (rank,), "node")}
    return found


def _of_collective(plan: Plan, holders: Sequence[int] | None) -> set[Opening]:
    """The channel of a bucket's holders, read from the ranks themselves; of the whole world for None."""
    mesh = plan.mesh
    if holders is None:
        return {Opening("world", tuple(range(mesh.pp)), "all")} if mesh.world > 1 else set()
    several = list(holders)
    ranks = tuple(sorted({rank // mesh.columns for rank in several}))  # mesh.coordinates, thousands of times
    held = len(several) // len(ranks)
    if held in (1, mesh.columns):
        return {Opening("reduce", ranks, "each" if held < mesh.columns else "all")}
    if several[1] - several[0] == 1:  # neighbours, and not all: of slices of the same experts
        return {Opening("reduce", ranks, "experts")}
    return {Opening("reduce", ranks, "slice" if mesh.tp > 1 and held == mesh.columns // mesh.tp else "member")}


def name_of(opening: Opening) -> str:
    """The name of a row in messages: open edge 0>1, open reduce 0, 1."""
    between = ">" if opening.kind == "edge" else ", "
    return f"open {opening.kind} {between.join(map(str, opening.ranks))}"


def _run(lines: Sequence[Line]) -> None:
    """A maximal run: a rank goes on from an opening once all its ranks have come to it."""
    done, arrived = [0] * len(lines), Counter[Opening]()
    runnable = deque(range(len(lines)))
    while runnable:
        rank = runnable.popleft()
        if done[rank] == len(lines[rank]):
            continue
        opening = lines[rank][done[rank]]
        arrived[opening] += 1
        if arrived[opening] == len(opening.ranks):
            for member in opening.ranks:
                done[member] += 1
            runnable.extend(opening.ranks)
    stuck = [rank for rank, line in enumerate(lines) if done[rank] < len(line)]
    if stuck:
        waits = [f"rank {rank}: {name_of(lines[rank][done[rank]])}" for rank in stuck]
        raise ProofError(f"{'; '.join(waits)}; none of them can go on")

"""Clusters of several kinds of nodes: what fits into their memory, and conflicts with the line that names them."""

from __future__ import annotations

import random
from itertools import combinations, product
from pathlib import Path

import pytest

from compiler.pipeline import lower_spec
from compiler.predict.memory_state import device_of, proven_memories
from dsl.load import check, load
from dsl.rules.resources import state_fits_each_kind
from dsl.schema import Device, Machine, MoreNodes, Spec
from tests.dsl.test_conflicts import TEXT, UI, Numbers, allowed, applied, keys_of, matches
from tests.runtime.step.specs import spec as small_spec

# ---------------------------------------------------------------- memory


def on_kinds(chosen: Spec, *memories: int) -> Spec:
    """The spec on as many nodes as pipeline ranks, each of another kind."""
    nodes = [Machine(devices=chosen.parallel.data, device=Device(name=f"d{m}", memory=m)) for m in memories]
    more_nodes = None
    for node in reversed(nodes[1:]):
        more_nodes = MoreNodes(nodes=1, node=node, more=more_nodes)
    cluster = chosen.cluster.model_copy(update={"nodes": 1, "node": nodes[0], "more": more_nodes})
    return chosen.model_copy(update={"cluster": cluster})


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_no_plan_that_fits_is_refused(schedule: str) -> None:
    """Two ranks on all pairs of memory sizes: a pair is refused exactly if no plan fits."""
    base = small_spec(2, 2, 2, 4, schedule=schedule)
    needed = [memory.total for memory in planned(on_kinds(base, 10**9, 10**9))]
    sizes = sorted({int(share * total) for total in needed for share in (0.05, 0.3, 0.6, 1.0, 1.5)})
    refused = 0
    for memories in product(sizes, repeat=2):
        chosen = on_kinds(base, *memories)
        if list(state_fits_each_kind(chosen)):
            refused += 1
            lacks = [need > available for need, available in zip(needed, memories, strict=True)]
            assert any(lacks), (memories, needed)
    assert 0.2 < refused / len(sizes) ** 2 < 0.9


def planned(chosen: Spec):  # type: ignore[no-untyped-def]
    lowered = lower_spec(chosen)
    assert device_of(chosen, lowered.plan, 1).name == chosen.cluster.devices[1].name
    return proven_memories(chosen, lowered.plan, lowered.certificates.values())


def test_the_device_with_the_last_stage_is_named() -> None:
    """1F1B has the last stage on the last rank, a V on the first; with mirrored stages the smaller memory counts."""
    paths = {}
    for schedule, memories in (("1f1b", (10**9, 2000)), ("zbv", (2000, 10**9)), ("dualpipe", (10**9, 2000))):
        (finding,) = state_fits_each_kind(on_kinds(small_spec(2, 2, 2, 4, schedule=schedule), *memories))
        paths[schedule] = finding.path
    assert paths == {
        "1f1b": "cluster.more.node.device.memory",
        "zbv": "cluster.node.device.memory",
        "dualpipe": "cluster",  # both copies of everything: even the mean is too large
    }


def test_clusters_of_one_kind_are_left_to_another_rule() -> None:
    alone = small_spec(2, 2, 2, 4)
    assert not list(state_fits_each_kind(alone))
    wrong = on_kinds(alone, 1, 1)
    parallel = wrong.parallel.model_copy(update={"data": 3})
    assert not list(state_fits_each_kind(wrong.model_copy(update={"parallel": parallel}))), "E0801 says that"


# ---------------------------------------------------------------- conflicts

KINDS = """
model random extends base {{
  layers 0..0 {{ ffn dense {{ inner = 64 }} }}
  layers 1..{last} {{ ffn moe {{ experts = {experts}, groups = {groups}, top_groups = 1, top_k = 1 }} }}
}}
cluster random {{
  nodes = 1, node {{ devices = {devices_here}, device cpu {{ memory = 4GB }} }}
  more {{ nodes = 1, node {{ devices = {devices_there}, device gpu {{ cores = 1, memory = 4GB }} }} }}
}}
"""
DOMAIN: dict[str, tuple[int | str, ...]] = {
    "pipeline": (1, 2, 3, 4, 6, 8, 12), "data": (1, 2, 3, 4, 6, 8, 12), "expert": (1, 2, 3),
    "expert_tensor": (1,), "nodes": (1,), "micro_batch": (1, 2), "batch": (4, 6, 8, 12, 16, 24, 32, 48, 96),
    "schedule": ("1f1b", "dualpipe", "dualpipev"),
    "experts": (2, 3, 6), "groups": (1, 2), "last": (9,),
}  # fmt: skip
WORLDS = (2, 3, 4, 6, 8, 12)


@pytest.fixture(scope="module")
def right() -> list[dict[str, int | str]]:
    """All assignments that the rules allow; for a pair of kinds only the sum matters."""
    assignments = []
    for values in product(*DOMAIN.values()):
        n = dict(zip(DOMAIN, values, strict=True))
        n["devices"] = int(n["pipeline"]) * int(n["data"])
        if allowed(n):
            assignments.append(n)
    return assignments


def written(folder: Path, n: Numbers) -> Path:
    half = int(n["devices"]) // 2
    kinds = KINDS.format(**n, devices_here=half, devices_there=int(n["devices"]) - half)
    base = (UI / "lib" / "base.dsc").read_text("utf-8")
    (folder / "base.dsc").write_text(base, encoding="utf-8")
    (folder / "library.dsc").write_text('import "base.dsc"\n' + kinds, encoding="utf-8")
    (folder / "spec.dsc").write_text('import "library.dsc"\n' + TEXT.format(**n), encoding="utf-8")
    return folder / "spec.dsc"


def test_lines_of_a_conflict_are_minimal(tmp_path: Path, right: list[dict[str, int | str]]) -> None:
    """No right assignment agrees with all lines of a conflict, one agrees with any fewer; edits correct the text."""
    random_, num_conflicts, with_cluster, mended = random.Random(7), 0, 0, 0
    while num_conflicts < 40:
        n: dict[str, int | str] = {key: random_.choice(values) for key, values in DOMAIN.items()}
        n["devices"] = random_.choice(WORLDS)
        if allowed(n):
            continue
        path = written(tmp_path, n)
        for item in (item for item in check(path) if item.conflict is not None):
            assert item.conflict is not None
            num_conflicts += 1
            keys = {"devices" if key == "cluster" else key for key in keys_of(item)}
            with_cluster += "devices" in keys
            assert keys <= n.keys() and not any(matches(assignment, n, keys) for assignment in right), (n, keys)
            for fewer in combinations(keys, len(keys) - 1):
                assert any(matches(assignment, n, {*fewer}) for assignment in right), (n, keys, fewer)
            if sum(mistake.conflict is not None for mistake in check(path)) == 1:
                for edits in item.conflict.resolutions:
                    applied(edits, [])
                    assert not {mistake.code for mistake in check(path)} - {"E0817"}
                    mended += 1
                    written(tmp_path, n)
    assert with_cluster >= 10 and mended >= 20


def test_edits_leave_no_rank_on_two_kinds(tmp_path: Path) -> None:
    """Mistakes that the search does not know about are noticed when the edited spec is read."""
    n: dict[str, int | str] = {
        "pipeline": 2, "data": 3, "expert": 2, "expert_tensor": 1, "nodes": 1, "devices": 8, "micro_batch": 1,
        "batch": 48, "schedule": "1f1b", "experts": 6, "groups": 1, "last": 9,
    }  # fmt: skip
    path = written(tmp_path, n)
    (item,) = (item for item in check(path) if item.conflict is not None)
    assert item.conflict is not None and item.conflict.resolutions
    for edits in item.conflict.resolutions:
        applied(edits, [])
        assert check(path) == ()
        load(path)
        written(tmp_path, n)

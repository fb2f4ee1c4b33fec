"""`dsc export chakra`: the step of a plan as execution traces, decoded without protobuf and compared with the plan."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from compiler.cli.main import main
from compiler.ir.expert_placement import ReceivedRows
from compiler.predict.predict import time_plan
from compiler.predict.timed_plan import TimedPlan
from compiler.schedule.schedule import Schedule
from compiler.tools.exporters.chakra import COLLECTIVES, FIELDS, NODES, export
from dsl.load import load
from runtime.contract.actions import Pair, actions_of, is_copy
from tests.compiler.cli.forms import parsed
from tests.runtime.step.test_host_copies import with_file

ROOT = Path(__file__).parents[4]
SCHEMA = json.loads((Path(__file__).parent / "chakra_fields.json").read_text("utf-8"))["mlc-chakra 1.0.0"]
NAMES = {message: {number: name for name, number in fields.items()} for message, fields in SCHEMA.items()}
TYPES = {number: name.removesuffix("_NODE") for name, number in SCHEMA["NodeType"].items()}
KINDS = {number: name for name, number in SCHEMA["CollectiveCommType"].items()}
BENCH, QUICK, GPUS = (str(ROOT / "specs" / f"{name}.dsc") for name in ("bench-4", "quickstart", "moe-8gpu"))
SMALL = ("train.batch=16", "parallel.pipeline=2", "parallel.expert=2")
Capture = pytest.CaptureFixture[str]
Node = dict[str, Any]
COPIES = """# copies ranks=2 micro_batches=4 placement=loop(1)
F0.0 O0.0 F0.1 R0.0 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3
F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3
"""
CASES: dict[str, tuple[str, ...]] = {
    "one_rank": (BENCH,),
    "dualpipe": (QUICK,),
    "1f1b": (QUICK, "schedule.name=1f1b"),
    "zero": (QUICK, "parallel.zero=2", "parallel.expert=1"),
    "overlapped": (GPUS, *SMALL, "schedule.name=dualpipe", "parallel.expert=4", "train.batch=32"),
    "tensor": (GPUS, *SMALL, "parallel.tensor=2", "parallel.context=2"),
    "weights_divided": (GPUS, *SMALL, "parallel.zero=3", "parallel.expert=4", "schedule.name=zb1p"),
    "host_copies": (QUICK, "schedule.name=1f1b"),
}


# ---------------------------------------------------------------- a decoder of protobuf's wire format, without protobuf


def varint(content: bytes, at: int) -> tuple[int, int]:
    """A varint, and the offset of its end."""
    value = shift = 0
    while True:
        value |= (content[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not content[at - 1] & 0x80:
            return value, at


def fields_of(content: bytes, message: str) -> dict[str, list[Any]]:
    """The values of a message by the names that the published schema has for their numbers."""
    fields: dict[str, list[Any]] = defaultdict(list)
    offset = 0
    while offset < len(content):
        tag, offset = varint(content, offset)
        number, wire = tag >> 3, tag & 7
        assert wire in (0, 2), "nothing that is written has a fixed width"
        value, offset = varint(content, offset)
        if wire == 2:
            value, offset = content[offset : offset + value], offset + value  # type: ignore[assignment]
        fields[NAMES[message][number]].append(value)
    return fields


def attributes(of: dict[str, list[Any]]) -> dict[str, Any]:
    values = {}
    for encoded in of.get("attr", []):
        fields = fields_of(encoded, "AttributeProto")
        name, (kind,) = fields.pop("name")[0].decode(), fields
        value = fields[kind][0]
        values[name] = value.decode() if kind == "string_val" else value - 2**64 if value >> 63 else value
    return values


def packed(values: list[Any]) -> list[int]:
    numbers = []
    for encoded in values:
        offset = 0
        while offset < len(encoded):
            number, offset = varint(encoded, offset)
            numbers.append(number)
    return numbers


def decoded(content: bytes) -> tuple[dict[str, Any], list[Node]]:
    """The attributes of a file, and its nodes."""
    messages, offset = [], 0
    while offset < len(content):
        length, offset = varint(content, offset)
        messages.append(content[offset : offset + length])
        offset += length
    head = fields_of(messages[0], "GlobalMetadata")
    assert head["version"] == [b"0.0.4"]
    nodes = []
    for message in messages[1:]:
        fields = fields_of(message, "Node")
        node = {key: fields.get(key, [0])[0] for key in ("id", "start_time_micros", "duration_micros")}
        node |= {"name": fields["name"][0].decode(), "type": TYPES[fields["type"][0]]}
        node |= {"data_deps": packed(fields["data_deps"]), "ctrl_deps": packed(fields["ctrl_deps"])}
        nodes.append(node | attributes(fields))
    return attributes(head), nodes


# ---------------------------------------------------------------- properties


@pytest.fixture(scope="module", params=CASES)
def traced(request: pytest.FixtureRequest) -> tuple[TimedPlan, list[tuple[dict[str, Any], list[Node]]]]:
    """A plan, and the contents of its files."""
    spec, *overrides = CASES[request.param]
    loaded = load(spec, overrides=overrides)
    if request.param == "host_copies":
        loaded = with_file(loaded, Schedule.from_text(COPIES))
    timed_plan = time_plan(loaded)
    return timed_plan, [decoded(content) for content in export(timed_plan).files.values()]


Traces = tuple[TimedPlan, list[tuple[dict[str, Any], list[Node]]]]


def links(found: TimedPlan, files: list[tuple[dict[str, Any], list[Node]]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """(a send, its receive), each as (rank, node)."""
    sends: dict[tuple[int, int, int], tuple[int, Node]] = {}
    for rank, (_, nodes) in enumerate(files):
        for node in nodes:
            if node["type"] == "COMM_SEND":
                assert node["comm_src"] == rank != node["comm_dst"]
                key = rank, node["comm_dst"], node["comm_tag"]
                assert key not in sends
                sends[key] = rank, node
    for rank, (_, nodes) in enumerate(files):
        for node in nodes:
            if node["type"] == "COMM_RECV":
                assert node["comm_dst"] == rank
                sender, send = sends.pop((node["comm_src"], rank, node["comm_tag"]))
                assert send["comm_size"] == node["comm_size"] > 0
                yield (sender, send["id"]), (rank, node["id"])
    assert not sends


def longest(found: TimedPlan, files: list[tuple[dict[str, Any], list[Node]]], *, planned: bool) -> int:
    """The longest path through all ranks, in microseconds.

    `planned`: with the plan's additional constraints. A step of a schedule starts after the previous step of its rank
    and after the steps whose messages it receives; gradient reductions run one after the other, and each starts on all
    its ranks together; everything after the last step starts on all ranks together.
    """
    graph: Any = nx.DiGraph()
    last = {rank: max(node["step"] for node in nodes) for rank, (_, nodes) in enumerate(files)}
    for rank, (metadata, nodes) in enumerate(files):
        groups = json.loads(metadata["process_groups"])
        for node in nodes:
            key = rank, node["id"]
            graph.add_node(key, time=node["duration_micros"])
            graph.add_edges_from(((rank, dependency), key) for dependency in node["data_deps"])
            if not planned:
                continue
            if node["step"] >= 0:
                if node["type"] != "MEM_LOAD":  # a rank continues during a copy back
                    graph.add_edge(key, ("end", rank, node["step"]))
                graph.add_edge(("end", rank, node["step"] - 1), ("start", rank, node["step"]))
                if node["type"] != "COMM_RECV":
                    graph.add_edge(("start", rank, node["step"]), key)
            elif found.plan.overlap_reduce and found.spec.has_hosts and node["name"].startswith("sum"):
                rendezvous = node["name"], tuple(groups[node["pg_name"]])
                before = [nodes[dependency] for dependency in node["data_deps"]]
                graph.add_edges_from(
                    (("end", rank, e["step"]) if e["step"] >= 0 else (rank, e["id"]), rendezvous) for e in before
                )
                graph.add_edge(rendezvous, key)
            else:
                graph.add_edge("all", key)
        graph.add_edge(("end", rank, last[rank]), "all")
    for (sender, send), target in links(found, files):
        graph.add_edge((sender, send), target)
        if planned:
            step = files[target[0]][1][target[1]]["step"]
            graph.add_edge(("end", sender, files[sender][1][send]["step"]), ("start", target[0], step))
    ends: dict[Any, int] = {}
    for key in nx.topological_sort(graph):
        earliest = max((ends[predecessor] for predecessor in graph.predecessors(key)), default=0)
        ends[key] = earliest + graph.nodes[key].get("time", 0)
    return max(ends.values())


def test_a_file_of_each_rank_is_acyclic(traced: Traces) -> None:
    timed_plan, files = traced
    assert len(files) == timed_plan.plan.mesh.world
    for rank, (metadata, nodes) in enumerate(files):
        assert (metadata["rank"], metadata["world_size"]) == (rank, timed_plan.plan.mesh.world)
        assert [node["id"] for node in nodes] == list(range(len(nodes)))
        for node in nodes:
            assert all(dependency < node["id"] for dependency in node["data_deps"])
            assert {*node["ctrl_deps"]} <= {*node["data_deps"]}
            for dependency in node["data_deps"]:  # nothing starts before what it waits for has ended
                earlier = nodes[dependency]
                assert earlier["start_time_micros"] + earlier["duration_micros"] <= node["start_time_micros"], node


def test_every_send_has_its_receive(traced: Traces) -> None:
    timed_plan, files = traced
    count = sum(1 for _ in links(timed_plan, files))
    assert (count > 0) == (timed_plan.plan.mesh.pp > 1)


def test_the_longest_path_is_the_planned_step(traced: Traces) -> None:
    """With the plan's additional constraints the path is the step; without them it is at most as long."""
    timed_plan, files = traced
    planned = longest(timed_plan, files, planned=True)
    assert planned == pytest.approx(timed_plan.step.seconds * 1e6, abs=3)
    assert longest(timed_plan, files, planned=False) <= planned


def test_sums_per_rank_equal_the_plan(traced: Traces) -> None:
    timed_plan, files = traced
    for rank, (_, nodes) in enumerate(files):
        pipeline_rank = timed_plan.plan.mesh.coordinates(rank).pp_rank
        spans: dict[int, tuple[int, int]] = {}
        for node in nodes:
            if node["step"] >= 0:
                start, end = node["start_time_micros"], node["start_time_micros"] + node["duration_micros"]
                low, high = spans.get(node["step"], (start, end))
                spans[node["step"]] = min(low, start), max(high, end)
        rows: Counter[str] = Counter()
        for step, (start, end) in spans.items():
            action = timed_plan.schedule.actions[pipeline_rank][step]
            rows["pair" if isinstance(action, Pair) else actions_of(action)[0].kind] += end - start
        planned = timed_plan.step.ranks[pipeline_rank]
        expected = {
            "F": planned.forward_s,
            "W": planned.weight_s,
            "pair": planned.overlapped_s,
            "B": planned.backward_s,
        }
        rows["B"] += rows.pop("I", 0)
        for kind, seconds in expected.items():
            assert rows[kind] == pytest.approx(seconds * 1e6, abs=len(spans)), (rank, kind)
        computed = sum(node["num_ops"] for node in nodes if node["type"] == "COMP")
        assert computed == flops_of(timed_plan, pipeline_rank)


def flops_of(found: TimedPlan, rank: int) -> int:
    """The FLOPs of a pipeline rank: for each action of its schedule, those of its stage's segments."""
    total, lowering = 0, found.lowering
    for step in found.schedule.actions[rank]:
        for action in (candidate for candidate in actions_of(step) if not is_copy(candidate)):
            chains = lowering.chains(action.stage, rank)
            for node in chains.chain(action.kind):
                if node.instruction.kind == "run":
                    cost = dict(chains.cuts[node.instruction.site].costs)[node.instruction.phase]
                    total += cost.flops + cost.flops_row * chains.rows
    return total


def test_host_copies_wait_for_the_forward_and_precede_the_backward(traced: Traces) -> None:
    """Copies exist only if the schedule has them: the copy out waits for the forward, the backward for the copy in."""
    timed_plan, files = traced
    for rank, (_, nodes) in enumerate(files):
        pipeline_rank = timed_plan.plan.mesh.coordinates(rank).pp_rank
        steps = [action for step in timed_plan.schedule.actions[pipeline_rank] for action in actions_of(step)]
        copied = [node for node in nodes if node["type"] in ("MEM_STORE", "MEM_LOAD")]
        assert [node["name"] for node in copied] == [str(action) for action in steps if is_copy(action)]
        for node in copied:
            saved = timed_plan.lowering.chains(steps[0].stage, pipeline_rank)
            assert node["tensor_size"] == saved.offloaded_bytes(ReceivedRows(saved.rows)) > 0
            assert node["data_deps"], "it is of what a forward made"
            assert any(node["id"] in reader["data_deps"] for reader in nodes), "something waits for it"


def test_a_backward_moves_as_many_rows_as_its_forward(traced: Traces) -> None:
    """The gradient of a gather is a scatter of the same size, and vice versa."""
    _, files = traced
    opposite = {"gather": "scatter", "scatter": "gather"}
    for _, nodes in files:
        sizes: dict[tuple[str, str, str, str], set[int]] = defaultdict(set)
        for node in nodes:
            way, _, unit = node["name"].partition(" ")[0].partition("_")
            if way in opposite and unit in ("rows", "sequences"):
                _, action, site = node["name"].split()
                sizes[action[0], way, unit, site].add(node["comm_size"])
        for (phase, way, unit, site), comm_sizes in sizes.items():
            assert len(comm_sizes) == 1
            if phase == "F":
                assert sizes["I", opposite[way], unit, site] == comm_sizes, (way, unit, site)


def test_members_of_a_group_make_the_same_collectives(traced: Traces) -> None:
    """All members of a group have the same calls in the same order, of one size; groups do not overlap."""
    _, files = traced
    of_group: dict[tuple[str, tuple[int, ...]], list[list[tuple[Any, ...]]]] = defaultdict(list)
    members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for rank, (metadata, nodes) in enumerate(files):
        groups = json.loads(metadata["process_groups"])
        assert all(rank in ranks for ranks in groups.values())
        for name, ranks in groups.items():
            members[name].add(tuple(ranks))
        calls: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for node in nodes:
            if node["type"] == "COMM_COLL":
                calls[node["pg_name"]].append((KINDS[node["comm_type"]], node["comm_size"]))
        for name, collectives in calls.items():
            of_group[name, tuple(groups[name])].append(collectives)
    for (name, ranks), of_members in of_group.items():
        assert len(of_members) == len(ranks), name
        assert all(member_calls == of_members[0] for member_calls in of_members), name
    for name, rank_groups in members.items():
        assert len({rank for ranks in rank_groups for rank in ranks}) == sum(map(len, rank_groups)), name


# ---------------------------------------------------------------- the schema, and the command


def test_field_numbers_match_the_published_schema() -> None:
    """`chakra_fields.json` is read from the descriptor of mlc-chakra 1.0.0."""
    for message, fields in FIELDS.items():
        assert {name: number for name, (number, _, _) in fields.items()}.items() <= SCHEMA[message].items()
    assert {f"{name}_NODE": number for name, number in NODES.items()}.items() <= SCHEMA["NodeType"].items()
    assert COLLECTIVES.items() <= SCHEMA["CollectiveCommType"].items()


def test_the_command_writes_a_file_for_each_rank(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "out"
    assert main(["export", "chakra", QUICK, "-o", str(folder), "--format", "json"]) == 0
    document = parsed(capsys.readouterr().out, "export")
    assert document["files"] == sorted(path.name for path in folder.iterdir())
    assert document["files"] == [f"quickstart.{rank}.et" for rank in range(4)]
    assert not any(loss["changes"] for loss in document["losses"])
    for path in folder.iterdir():
        _, nodes = decoded(path.read_bytes())
        assert {"COMP", "COMM_SEND", "COMM_RECV", "COMM_COLL"} == {node["type"] for node in nodes}


def test_without_protobuf_the_package_is_named(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compiler.predict import predict
    from compiler.tools.exporters import chakra

    chakra.messages.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "google.protobuf", None)
    monkeypatch.setattr(predict, "time_plan", lambda spec: pytest.fail("times are computed first"))
    assert main(["export", "chakra", QUICK, "-o", str(tmp_path / "out")]) == 2
    assert "pip install 'dsc-trainer[chakra]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

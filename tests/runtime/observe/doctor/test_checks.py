"""Checks of `dsc doctor` on pretend nodes: each fault is named, with a remedy."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from runtime.build.files import read
from runtime.contract import NodeKind, RunPlan, node_kind
from runtime.launch.room import checkpoint_bytes
from runtime.observe.device import check as check_device
from runtime.observe.device import check_ranks
from runtime.observe.doctor.checks import (
    CheckFinding,
    CheckProblem,
    CudaDevice,
    LinkSpeeds,
    NodeFacts,
    check,
    device_faults,
)
from runtime.system.outcome import ReportedError
from tests.compiler.tools.launch.conftest import one_node as one_node
from tests.runtime.observe.doctor.nodes import CPUS, GIB, GPUS, H100, changed


@pytest.fixture(scope="session")
def plan(one_node: Path) -> RunPlan:
    """A plan for one rank on a CPU."""
    return RunPlan.from_json(read(one_node).files["plan.json"])


def on_gpus(plan: RunPlan, nodes: int = 2) -> RunPlan:
    """The plan on nodes of eight H100."""
    return replace(plan, cluster=(NodeKind(nodes, 8, "h100", 132, 79 * GIB),))


def wrong(node: NodeFacts, plan: RunPlan | None) -> list[CheckFinding]:
    return [finding for finding in check(node, plan) if finding.status != "ok"]


def test_a_good_node_has_no_faults(plan: RunPlan) -> None:
    assert wrong(CPUS, None) == wrong(CPUS, plan) == wrong(GPUS, None) == wrong(GPUS, on_gpus(plan)) == []
    names = [finding.name for finding in check(GPUS, on_gpus(plan))]
    assert len(names) == len({*names}) == 13


def test_the_build_states_its_cluster(plan: RunPlan) -> None:
    assert plan.cluster == (NodeKind(1, 1, "cpu", None, 4 * 10**9),)
    assert node_kind(plan.cluster, 0) is plan.cluster[0] and sum(kind.nodes for kind in plan.cluster) == 1
    with pytest.raises(IndexError):
        node_kind(plan.cluster, 1)


CHANGES = [
    ("devices", replace(GPUS, devices=(H100,) * 7), "error", "use another node"),
    ("device", replace(GPUS, devices=(replace(H100, sms=114),) * 8), "error", "write `sms = 114` in device h100"),
    (
        "device",
        replace(GPUS, devices=(replace(H100, memory_bytes=40 * GIB),) * 8),
        "error",
        "write `memory = 40960MiB`",
    ),
    ("device", replace(GPUS, devices=(replace(H100, name="NVIDIA H200"),) * 8), "warning", "rates of the plan"),
    ("versions", changed(GPUS, "drivers", cuda=""), "error", "this torch is for CPUs"),
    ("versions", changed(GPUS, "drivers", triton=""), "error", "pip install triton"),
    ("versions", changed(GPUS, "drivers", nccl=""), "error", "ranks on GPUs need NCCL"),
    ("versions", changed(GPUS, "drivers", driver="470.57"), "error", "install a driver"),
    ("/dev/shm", changed(GPUS, "memory", shared_bytes=64 << 20), "error", "--shm-size"),
    ("disk", changed(GPUS, "disk", is_writable=False), "error", "--out"),
    ("disk", changed(GPUS, "disk", free_bytes=1000), "error", "make room"),
    ("open files", changed(GPUS, "limits", files=256), "warning", "ulimit -n 1024"),
    ("locked memory", changed(GPUS, "limits", locked_bytes=65536), "warning", "ulimit -l unlimited"),
    ("network", changed(GPUS, "network", port_problem="Address already in use"), "error", "--port"),
    ("network", changed(GPUS, "network", address="127.0.1.1"), "warning", "--interface"),
    ("network", changed(GPUS, "network", address=""), "warning", "--interface"),
    ("clock", changed(GPUS, "clock", now_s=0.0), "error", "set it"),
    ("clock", changed(GPUS, "clock", is_synchronised=False), "warning", "chrony"),
    ("links", replace(GPUS, links=LinkSpeeds(5e9, 5e10, 1e10, 1e10)), "warning", "nvidia-smi topo -m"),
]


@pytest.mark.parametrize(("name", "node", "status", "mend"), CHANGES)
def test_each_thing_that_is_wrong_is_named(name: str, node: NodeFacts, status: str, mend: str, plan: RunPlan) -> None:
    findings = wrong(node, on_gpus(plan))
    assert {(finding.name, finding.status) for finding in findings} == {(name, status)}
    assert all(mend in finding.mend for finding in findings)


def test_a_node_of_cpus(plan: RunPlan) -> None:
    (finding,) = wrong(changed(CPUS, "memory", free_bytes=10), plan)
    assert (finding.name, finding.status) == ("memory", "error") and "ranks hold" in finding.found
    needed = max(plan.memory)
    assert wrong(changed(CPUS, "memory", free_bytes=needed), plan) == []
    assert [finding.name for finding in wrong(changed(CPUS, "memory", free_bytes=needed - 1), plan)] == ["memory"]
    (finding,) = wrong(replace(CPUS, native="no C++ was compiled; `compile` compiles it"), plan)
    assert (finding.name, finding.status, finding.mend) == ("ops in C++", "warning", "`compile` compiles it")
    (finding,) = wrong(replace(CPUS, cpus=1), replace(plan, cluster=(NodeKind(1, 2, "cpu", None, 4 * 10**9),)))
    assert (finding.name, finding.status, finding.found) == ("cores", "warning", "1 cores for 2 ranks")
    small = replace(plan, cluster=(NodeKind(1, 1, "cpu", None, 10),))
    assert [finding.name for finding in wrong(CPUS, small)] == ["memory"]


def test_the_disk_holds_the_checkpoints_of_the_plan(plan: RunPlan) -> None:
    needed = 2 * checkpoint_bytes(plan)
    assert plan.train.checkpoint is None
    assert wrong(changed(CPUS, "disk", free_bytes=needed), plan) == []
    assert [finding.name for finding in wrong(changed(CPUS, "disk", free_bytes=needed - 1), plan)] == ["disk"]


@pytest.mark.parametrize("fact", [field.name for field in fields(NodeFacts) if field.name != "cpus"])
@pytest.mark.parametrize("node", [CPUS, GPUS])
def test_unknown_facts_are_reported(fact: str, node: NodeFacts, plan: RunPlan) -> None:
    """An unknown fact neither ends in a traceback nor counts as right."""
    gone = replace(node, **{fact: CheckProblem("no answer within 8 s\x1b[31m")})
    findings = wrong(gone, on_gpus(plan) if node is GPUS else plan)
    assert findings and any("no answer within 8 s" in finding.found and finding.mend for finding in findings)
    assert all(finding.found.isprintable() for finding in findings)


# ---------------------------------------------------------------- the same faults before the first step


def test_a_device_that_differs_from_the_spec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Properties:
        name, multi_processor_count, total_memory = "NVIDIA H20", 78, 96 * GIB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    kind = NodeKind(1, 8, "h100", 132, 79 * GIB)
    with pytest.raises(
        ReportedError, match="device 3, NVIDIA H20, has 78 SMs, and the build is for 132: write `sms = 78`"
    ):
        check_device(torch.device("cuda", 3), kind)
    check_device(torch.device("cuda", 3), replace(kind, sms=78))
    check_device(torch.device("cpu"), kind)
    with pytest.raises(ReportedError, match="has 78 SMs"):
        check_device(torch.device("cuda", 3), kind, shared=True)
    larger = replace(kind, sms=78, memory=97 * GIB)
    with pytest.raises(ReportedError, match=r"96\.0 GiB, and the build is for 97"):
        check_device(torch.device("cuda", 3), larger)
    check_device(torch.device("cuda", 3), larger, shared=True)


def test_a_node_with_other_ranks_than_planned_is_refused() -> None:
    kind = NodeKind(2, 8, "h100", 132, 79 * GIB)
    with pytest.raises(ValueError, match="this node starts 4 ranks, and the build is for nodes of 8"):
        check_ranks(kind, 4)
    check_ranks(kind, 8)
    check_ranks(replace(kind, sms=None), 4)


def test_faults_of_devices() -> None:
    kind = NodeKind(1, 2, "h100", 132, 79 * GIB)
    assert list(device_faults(kind, (H100, H100))) == []
    assert len(list(device_faults(kind, (H100, CudaDevice("x", 1, 1))))) == 2
    assert list(device_faults(replace(kind, sms=None), (CudaDevice("x", 1, 1),))) == []

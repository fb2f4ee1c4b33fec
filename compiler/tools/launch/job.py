"""A job of `dsc launch`: the needs of its builds, and paths on the nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dsl.load import analyse
from dsl.messages.diagnostics import SpecError
from dsl.resolve.files import reader_of_texts
from dsl.schema.cluster import Cluster
from runtime.build.files import BuildError, read
from runtime.contract import RunPlan
from runtime.contract.options import run_name
from runtime.system.strict_json import FormError, NoJsonError

RESOLVED = "spec.resolved"


class LaunchError(Exception):
    """No files can be written for a build or option. `hint`: how to change the command line."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Needs:
    """The needs of a build: nodes with equal numbers of devices, and one rank on each device.

    `memory_bytes`: of a device, by the spec. `digest`: of the build's manifest. `finds_text`: whether the data is
    Python's own source, which every node has.
    """

    run: str
    nodes: int
    ranks_per_node: int
    device: str
    is_cpu: bool
    cores_per_node: int
    memory_bytes: int
    digest: str
    finds_text: bool
    phase: int = 1
    phases: int = 1

    @property
    def is_amd(self) -> bool:
        """Whether the devices are AMD GPUs, judging by their name."""
        return self.device.lower().startswith("mi")


@dataclass(frozen=True)
class ElasticSettings:
    """Settings of a run that continues without lost nodes. `least`: minimum nodes; `restarts`: maximum restarts of the
    ranks and of each node; `gather_s`: seconds after the start of torchrun in which late nodes are waited for."""

    least: int
    restarts: int
    gather_s: int


@dataclass(frozen=True)
class Job:
    """A job that trains a build, or the builds of a run's phases. Paths are those on the nodes.

    `needs`: of the first build; all builds need equal nodes. `builds`: (folder, digest). `run`, `data`: folders.
    `python`: the interpreter on the nodes. `port`: a free port of the first node; each further build uses the next
    one. `environment`: variables of every rank. `arguments`: further options of train.py, each with its value.
    `elastic`: None if the run needs all nodes.
    """

    needs: Needs
    name: str
    builds: tuple[tuple[str, str], ...]
    run: str
    data: str
    python: str
    port: int
    environment: Mapping[str, str]
    arguments: tuple[tuple[str, ...], ...]
    elastic: ElasticSettings | None = None


def needs_of_phases(builds: Sequence[Path]) -> tuple[Needs, ...]:
    """Return the needs of the builds of a run's phases, in order. Raises LaunchError if they are not consecutive phases
    of one run, or if they need different nodes."""
    needs_by_phase = tuple(map(needs_of, builds))
    for (before, needs), build in zip(pairwise(needs_by_phase), builds[1:], strict=True):
        if (run_name(needs.run), needs.phase) != (run_name(before.run), before.phase + 1):
            raise LaunchError(
                f"{build} is not the phase after phase {before.phase} of run {run_name(before.run)}",
                "name the builds of one run's phases in order, or write files for each build separately",
            )
        if _nodes(needs) != _nodes(before):
            raise LaunchError(
                f"phase {needs.phase} needs {_nodes(needs)}, and phase {before.phase} {_nodes(before)}: a job cannot"
                " change its nodes",
                "write files for each phase separately, and start them one after the other",
            )
    return needs_by_phase


def _nodes(needs: Needs) -> str:
    return f"{needs.nodes} × {needs.ranks_per_node} devices {needs.device}"


def needs_of(build: Path) -> Needs:
    """Return the needs of a build. Raises LaunchError if the build is damaged, or if its nodes have different numbers
    of devices."""
    try:
        contents = read(build)
        plan = RunPlan.from_json(contents.files["plan.json"])
        cluster = _cluster(build, contents.files[RESOLVED].decode())
    except BuildError as error:
        raise LaunchError(str(error), "name the folder that `dsc compile` wrote: dsc launch slurm build/NAME") from None
    except (KeyError, ValueError, NoJsonError, FormError, SpecError):
        raise LaunchError(
            f"{build} cannot be read: another version of dsc wrote its plan or its spec", "run `dsc compile` again"
        ) from None
    counts = {machine.devices for _, machine in cluster.parts}
    if len(counts) > 1 or cluster.world != plan.mesh.world:
        listed = ", ".join(f"{nodes} of {machine.devices}" for nodes, machine in cluster.parts)
        raise LaunchError(
            f"the nodes of cluster {cluster.name} have different numbers of devices ({listed}), but a launcher starts"
            " equally many ranks on each node",
            "describe the cluster as nodes with equal numbers of devices, or start torchrun by hand: docs/torchrun.md",
        )
    device = cluster.node.device
    is_cpu, within = device.bf16 is None, plan.train.within
    return Needs(
        run=plan.run,
        nodes=cluster.num_nodes,
        ranks_per_node=counts.pop(),
        device=device.name,
        is_cpu=is_cpu,
        cores_per_node=cluster.node.devices * (device.cores or 1),
        memory_bytes=min(kind.memory for kind in cluster.devices),
        digest=contents.digest,
        finds_text={plan.data.source, *(source.files for source in plan.data.sources)} <= {"python_stdlib", None},
        phase=within.number if within else 1,
        phases=within.phases if within else 1,
    )


def _cluster(build: Path, text: str) -> Cluster:
    path = os.path.realpath(build / RESOLVED)
    (view,) = analyse(path, reader=reader_of_texts({path: text})).views
    if view.spec is None:
        raise ValueError("the spec is wrong")
    return view.spec.cluster

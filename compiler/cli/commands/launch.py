"""`dsc launch torchrun|slurm|kubernetes|skypilot BUILD …`: write the files that start a build on a cluster. Nothing is
submitted.

dsc launch torchrun build/pretrain                            a script to run on each node
dsc launch slurm build/pretrain --time 24:00:00 --partition gpu
dsc launch slurm build/pretrain --time 24:00:00 --image registry/dsc:1 --gres gpu:8 --sbatch reservation=week
dsc launch kubernetes build/pretrain --image registry/dsc:1 --volume shared
dsc launch skypilot build/pretrain --image registry/dsc:1 --volume shared --infra k8s
dsc launch torchrun build/long build/long.to_128              the phases of a run, one after the other

Each node has one task, which starts torchrun. A run that is asked to stop finishes its step and saves a checkpoint; the
same files resume from it (docs/torchrun.md).

Exit codes: 0 the files are written · 2 the build or the command line is wrong
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import reason, report_error
from compiler.cli.commands.output_files import replace
from compiler.tools.launch import options
from compiler.tools.launch.files import LAUNCHERS, LaunchFiles
from compiler.tools.launch.job import ElasticSettings, Job, LaunchError, Needs, needs_of_phases
from runtime.contract.options import run_name
from runtime.system.outcome import printable

VERSION = 1  # of the JSON, docs/json.md
DEFAULTS: dict[str, Any] = {"lead": 300, "restarts": 0, "grace": 300, "gather": 30}
DEFAULTS |= {"resource": [], "sbatch": [], "field": []}
VOLUME = "/mnt/dsc"  # default mount point of the volume of a remote launcher
OFTEN = 100  # restarts of an elastic run: each node that leaves or returns uses one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command. Options of a single launcher have no default here, so that `run` sees which were
    given."""
    add = parser.add_argument
    add(
        "launcher",
        choices=tuple(LAUNCHERS),
        help="; ".join(f"{name}: {launcher.description}" for name, launcher in LAUNCHERS.items()),
    )
    text = "build folder, written by dsc compile; for a run with phases, the builds of all phases in order"
    add("builds", metavar="BUILD", type=Path, nargs="+", help=text)
    add("--out", metavar="FOLDER", type=Path, help="folder for the files; default: launch/<run>")
    add("--format", choices=("text", "json"), default="text", help="default: text")
    add("--name", type=options.label, help="job name; default: the name of the run")
    add(
        "--run-folder",
        metavar="RUN",
        help="run folder, shared by all nodes; default: runs/<run>, here or on the volume",
    )
    add(
        "--build-path",
        metavar="DIR",
        help="path of the build on the nodes; default: BUILD, or build/<run> on the volume",
    )
    add("--data", metavar="DIR", help="path of the data on the nodes; default: the current folder, or the volume")
    add(
        "--python",
        metavar="FILE",
        help="Python on the nodes; default: the one that runs dsc, or python3 in a container",
    )
    port = options.number(1024, 65535, "a port")
    add(
        "--port",
        type=port,
        default=29400,
        help="a free port of the first node; further builds use the ports after it; default: 29400",
    )
    add("--interface", type=options.interface, help="network interface between nodes, such as eth0")
    add("--hca", type=options.interface, help="InfiniBand adapters for NCCL, such as mlx5_0,mlx5_1")
    add(
        "--env",
        type=options.variable,
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="environment variable of all ranks",
    )
    add("--steps", type=options.number(1, 10**9, "a number of steps"), metavar="N", help="end after step N")
    restarts = options.number(0, 1000, "a number of restarts")
    text = f"restart up to N times after a failure; default: 0, with --elastic {OFTEN}"
    add("--restarts", type=restarts, metavar="N", help=text)
    elastic = parser.add_argument_group("torchrun and slurm").add_argument
    nodes = options.number(1, 10**6, "a number of nodes")
    text = "after losing nodes, continue with at least MIN of them, and use the others again when they return"
    elastic("--elastic", type=nodes, metavar="MIN", help=text)
    seconds = options.number(1, 3600, "a number of seconds")
    text = "with --elastic: at the start, wait for late nodes until S seconds after torchrun; default: 30"
    elastic("--gather", type=seconds, metavar="S", help=text)

    slurm = parser.add_argument_group("slurm").add_argument
    slurm("--time", type=options.time_limit, help="time limit of a job, such as 24:00:00")
    lead = options.number(1, 65535, "a number of seconds")
    slurm(
        "--lead",
        type=lead,
        metavar="S",
        help="stop S seconds before the time limit, enough for a step and a save; default: 300",
    )
    for name in ("partition", "account", "qos", "constraint"):
        slurm(f"--{name}", help="option of sbatch; default: the cluster's")
    slurm("--gres", help="option of sbatch, such as gpu:h100:8,nvme; default: as many GPUs as the build needs")
    text = "another option of sbatch, such as reservation=maintained; can be repeated"
    slurm("--sbatch", type=options.sbatch, metavar="NAME=VALUE", action="append", help=text)

    image = parser.add_argument_group("slurm, kubernetes and skypilot").add_argument
    text = "container image with dsc; slurm: registry/name:tag or a .sqsh for Pyxis, a .sif for Apptainer"
    image("--image", type=options.image, help=text)
    text = f"mount point of the volume in a container, {VOLUME} by default; slurm: another folder to mount"
    image("--mount", type=options.mount, metavar="DIR", help=text)

    container = parser.add_argument_group("kubernetes and skypilot").add_argument
    container(
        "--volume", type=options.object_name, help="PersistentVolumeClaim, or SkyPilot volume, shared by all nodes"
    )
    text = 'kubernetes: pod field, such as nodeSelector={"pool": "a"}; skypilot: resources field, such as use_spot=true'
    container("--field", type=options.field, metavar="NAME=JSON", action="append", help=text)
    container("--namespace", type=options.object_name, help="kubernetes: namespace; default: kubectl's")
    resource = options.resource
    container("--resource", type=resource, metavar="NAME=COUNT", action="append", help="kubernetes: such as rdma/ib=1")
    grace = options.number(1, 10**6, "a number of seconds")
    container(
        "--grace", type=grace, metavar="S", help="kubernetes: grace period, enough for a step and a save; default: 300"
    )
    container("--infra", help="skypilot: cloud or Kubernetes, such as k8s; default: SkyPilot's choice")
    container("--accelerator", help="skypilot: its name of the device; default: from the spec")


def run(args: argparse.Namespace) -> int:
    """Write the files. Returns the exit code."""
    launcher = LAUNCHERS[args.launcher]
    if (code := check_options(args)) is not None:
        return code
    try:
        needs = needs_of_phases(args.builds)
        name = run_name(needs[0].run) if len(needs) > 1 else needs[0].run
        folder = Path(os.path.abspath(args.out or Path("launch") / name))  # noqa: PTH100 - links stay as they are
        if any(folder.is_relative_to(build.resolve()) for build in args.builds):
            return report_error(
                f"{folder} is inside the build, which may hold only what was compiled",
                "name another --out",
                args.format,
            )
        if len(needs) > 1 and args.build_path is not None:
            return report_error(
                "--build-path is for a single build",
                "leave it out, or write the files of each phase separately",
                args.format,
            )
        if args.elastic is not None and (refusal := _no_elastic(args.elastic, needs)):
            return report_error(*refusal, args.format)
        job = _job(args, needs, is_remote=launcher.is_remote)
        files = launcher.write(job, args, folder)
    except LaunchError as error:
        return report_error(str(error), error.hint, args.format)
    try:
        _write(folder, files)
    except OSError as error:
        return report_error(
            f"{folder} cannot be written: {reason(error)}", "name another folder with --out", args.format
        )
    print(_as_json(args.launcher, job, folder, files) if args.format == "json" else _as_text(folder, files))
    if (last := needs[-1]).phase < last.phases:
        text = f"the files end with phase {last.phase} of {last.phases}: append the builds of the later phases"
        print(f"note: {text}", file=sys.stderr)
    return 0


def check_options(args: argparse.Namespace) -> int | None:
    """Check that required options are given and options of other launchers are not, then fill in the defaults.

    Returns None, or the exit code after printing an error.
    """
    launcher = LAUNCHERS[args.launcher]
    for name in {name for candidate in LAUNCHERS.values() for name in candidate.takes} - {*launcher.takes}:
        if getattr(args, name) is not None:
            owners = " and ".join(owner for owner, candidate in LAUNCHERS.items() if name in candidate.takes)
            return report_error(
                f"--{name} is an option of {owners}, not of {args.launcher}", "leave it out", args.format
            )
    for name, meaning in (launcher.needs or {}).items():
        if getattr(args, name) is None:
            return report_error(f"{args.launcher} needs --{name}: {meaning}", f"add --{name}", args.format)
    if args.elastic is None and args.gather is not None:
        return report_error("--gather needs --elastic", "leave it out, or add --elastic 1", args.format)
    if args.elastic is not None and args.restarts is None:
        args.restarts = OFTEN
    if launcher.is_remote and args.mount is None:
        args.mount = VOLUME
    if args.mount is not None and args.image is None:
        return report_error("--mount needs a container", "leave it out, or add --image", args.format)
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return None


def _no_elastic(least: int, needs: Sequence[Needs]) -> tuple[str, str] | None:
    """Why a run of these builds cannot be elastic, and a hint; None if it can."""
    if len(needs) > 1:
        return "--elastic is for a single build: a node that returns would start with the first phase", "name one build"
    if (nodes := needs[0].nodes) == 1:
        return "--elastic needs several nodes, but the build is for one", "leave it out"
    if least > nodes:
        return f"--elastic {least} is more than the {nodes} nodes of the build", f"use 1 to {nodes}"
    return None


def _job(args: argparse.Namespace, needs: Sequence[Needs], *, is_remote: bool) -> Job:
    """The job, with folders as the nodes see them: on the volume, or at the same paths as here."""
    top = Path(args.mount) if is_remote else Path.cwd()
    build_paths = [
        top / "build" / phase_needs.run if is_remote else build.absolute()
        for phase_needs, build in zip(needs, args.builds, strict=True)
    ]
    builds = [args.build_path or str(build) for build in build_paths]
    name = run_name(needs[0].run)
    environment = dict(args.env)
    if args.interface is not None:
        environment |= {"NCCL_SOCKET_IFNAME": args.interface, "GLOO_SOCKET_IFNAME": args.interface.lstrip("=")}
    if args.hca is not None:
        environment["NCCL_IB_HCA"] = args.hca
    return Job(
        needs=needs[0],
        name=args.name or options.label_of(name),
        builds=tuple(zip(builds, (phase_needs.digest for phase_needs in needs), strict=True)),
        run=args.run_folder or str(top / "runs" / name),
        data=args.data or str(top),
        python=args.python or ("python3" if args.image is not None else sys.executable),
        port=args.port,
        environment=environment,
        arguments=(("--steps", str(args.steps)),) if args.steps is not None else (),
        elastic=None if args.elastic is None else ElasticSettings(args.elastic, args.restarts, args.gather),
    )


def _write(folder: Path, files: LaunchFiles) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files.files:
        path = folder / file.name
        replace(path, file.text.encode())
        if file.is_program:
            path.chmod(path.stat().st_mode | 0o111)


def _as_text(folder: Path, files: LaunchFiles) -> str:
    lines = [f"{folder / file.name}: {file.description}" for file in files.files]
    return "\n".join(map(printable, [*lines, "start:", *(f"  {command}" for command in files.commands)]))


def _as_json(launcher: str, job: Job, folder: Path, files: LaunchFiles) -> str:
    needs = job.needs
    value = {
        "version": VERSION,
        "launcher": launcher,
        "run": needs.run,
        "builds": [digest for _, digest in job.builds],
        "nodes": needs.nodes,
        "ranks_per_node": needs.ranks_per_node,
        "files": [
            {"path": str(folder / file.name), "bytes": len(file.text.encode()), "what": file.description}
            for file in files.files
        ],
        "commands": list(files.commands),
    }
    return json.dumps(value, indent=2, ensure_ascii=False)

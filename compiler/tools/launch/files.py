"""The files of each launcher. `LAUNCHERS` has the launchers, with the options that they take and need."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from compiler.tools.launch import manifests
from compiler.tools.launch.job import Job, LaunchError
from compiler.tools.launch.manifests import Pods, Sky, documents
from compiler.tools.launch.options import check_line, enroot_image, includes_devices, registry_image, seconds_of

# --- Shell scripts from templates. A template can print only numbers and quoted words, so that no name in a spec, path
# or option becomes code


class QuotedText(str):
    """Text that is already quoted for a shell: one word, or several."""


def quote(text: str) -> QuotedText:
    """Quote a text as one shell word."""
    assert "\0" not in text, "an argument of a process cannot contain a NUL"
    return QuotedText(shlex.quote(text))


def script(template: str, **values: Any) -> str:
    """Return the text of a script. All values of the template must be given; text must be `QuotedText`."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        finalize=_check_value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it would escape for HTML; `_check_value` refuses text that is not quoted for a shell
    )
    templates.filters["q"] = quote
    return templates


def _check_value(value: object) -> object:
    assert isinstance(value, (QuotedText, int)), f"{value!r} is not quoted"
    return value


# --- files

# How torchrun meets in an elastic run. A machine whose torchrun is silent for 5 s is left out. Others come at most 3 s
# after one another: they all notice the loss at once, and --gather waits for those that come late to the start.
MEETING = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"

NODE_SCRIPT = "node.sh"
CLOUD_NAMES = {"a100": "A100-80GB", "h100": "H100", "h200": "H200"}  # SkyPilot's names of devices


@dataclass(frozen=True)
class LaunchFile:
    """A file to write: its name in the folder, its text, and a description."""

    name: str
    text: str
    description: str
    is_program: bool = False


@dataclass(frozen=True)
class LaunchFiles:
    """Files, and the commands with which a person then starts the run."""

    files: tuple[LaunchFile, ...]
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Launcher:
    """A launcher. `takes`: options that not all launchers have; `needs`: required options, with descriptions.

    `is_remote`: nodes do not see the folders of this machine, so files are on a shared volume.
    """

    description: str
    write: Callable[[Job, argparse.Namespace, Path], LaunchFiles]
    takes: tuple[str, ...] = ()
    needs: Mapping[str, str] | None = None
    is_remote: bool = False


def torchrun(job: Job, args: argparse.Namespace, folder: Path) -> LaunchFiles:
    """Return a script to start on each node, by hand or over ssh."""
    several = job.needs.nodes > 1
    last = job.needs.nodes - 1
    start = f"{quote(str(folder / NODE_SCRIPT))} {'HOST NODE' if several else ''}".rstrip()
    note = f"  # on every node: HOST is the first node, NODE is 0 on it, up to {last} on the others" if several else ""
    return LaunchFiles((_node_script(job, "words", restarts=args.restarts),), (start + note,))


def slurm(job: Job, args: argparse.Namespace, folder: Path) -> LaunchFiles:
    """Return a batch script that starts one task per node."""
    limit = seconds_of(args.time)
    if limit is not None and args.lead >= limit:
        raise LaunchError(
            f"--lead {args.lead} is not below --time {args.time}: the signal would precede the job",
            "use a longer --time or a shorter --lead",
        )
    needs = job.needs
    values = {
        "partition": args.partition,
        "account": args.account,
        "qos": args.qos,
        "constraint": args.constraint,
        "gres": args.gres,
    }
    options = [f"--{name}={check_line(f'--{name}', value)}" for name, value in values.items() if value is not None]
    has_devices = args.gres is not None and includes_devices(args.gres, 0 if needs.is_cpu else needs.ranks_per_node)
    batch = script(
        "job.sbatch.j2",
        job_name=QuotedText(job.name),
        nodes=needs.nodes,
        least=job.elastic.least if job.elastic else 0,
        gpus=0 if needs.is_cpu or has_devices else needs.ranks_per_node,
        time=QuotedText(args.time),
        lead=args.lead,
        options=[QuotedText(option) for option in (*options, *args.sbatch)],
        container=_container(job, args, folder),
        node_script=str(folder / NODE_SCRIPT),
        run=job.run,
        restarts=args.restarts,
    )
    job_file = LaunchFile("job.sbatch", batch, "the script that sbatch submits", is_program=True)
    return LaunchFiles((job_file, _node_script(job, "slurm")), (f"sbatch {quote(str(folder / job_file.name))}",))


def _container(job: Job, args: argparse.Namespace, folder: Path) -> QuotedText:
    """Return the words before a task that make srun run it in the image: Apptainer for a .sif, else options of Pyxis.

    The container mounts the folders of the job at their own paths, and the folder of --mount.
    """
    if args.image is None:
        return QuotedText("")
    folders = dict.fromkeys([str(folder), *(build for build, _ in job.builds), job.run, job.data])
    if args.mount is not None:
        folders |= {args.mount: None}
    for path in folders:
        if not path.startswith("/") or set(path) & set(",:"):
            raise LaunchError(
                f"the folder {path!r} cannot be mounted: a path must be absolute, without comma or colon",
                "give absolute paths to --out, --run-folder, --build-path and --data",
            )
    mounts = ",".join(f"{path}:{path}" for path in folders)
    if not args.image.endswith(".sif"):
        image = f"--container-image={enroot_image(args.image)}"
        return QuotedText(shlex.join([image, f"--container-mounts={mounts}"]))
    devices = [] if job.needs.is_cpu else ["--rocm" if job.needs.is_amd else "--nv"]
    return QuotedText(shlex.join(["apptainer", "exec", *devices, "--bind", mounts, args.image]))


def kubernetes(job: Job, args: argparse.Namespace, folder: Path) -> LaunchFiles:
    """Return a JobSet, with the script of a node in a ConfigMap."""
    resources = dict(args.resource)
    fields = manifests.check_fields(dict(args.field), manifests.POD_FIELDS, "a pod")
    image = registry_image(args.image)
    pods = Pods(image, args.namespace, args.volume, args.mount, resources, fields, args.grace, args.restarts)
    values = manifests.jobset(job, pods, _node_script(job, "jobset", manifests.first_host(job)).text)
    manifest = LaunchFile("jobset.yaml", documents(*values), "a ConfigMap and a JobSet")
    return LaunchFiles((manifest,), (f"kubectl apply -f {quote(str(folder / manifest.name))}",))


def skypilot(job: Job, args: argparse.Namespace, folder: Path) -> LaunchFiles:
    """Return a managed job."""
    accelerator = args.accelerator or CLOUD_NAMES.get(job.needs.device.lower(), "")
    if not accelerator and not job.needs.is_cpu:
        raise LaunchError(
            f"dsc knows no SkyPilot name for the spec's device {job.needs.device}",
            "name it with --accelerator: `sky show-gpus` lists them",
        )
    fields = manifests.check_fields(dict(args.field), manifests.SKY_FIELDS, "resources of SkyPilot")
    sky = Sky(registry_image(args.image), args.infra, accelerator, args.volume, args.mount, fields, args.restarts)
    task = manifests.sky_task(job, sky, _node_script(job, "skypilot").text)
    manifest = LaunchFile("task.yaml", documents(task), "a task of SkyPilot")
    return LaunchFiles((manifest,), (f"sky jobs launch {quote(str(folder / manifest.name))}",))


def _node_script(job: Job, place: str, host: str = "", restarts: int = 0) -> LaunchFile:
    """Return the script that every node runs. `place`: where it finds the first node and its own number. `restarts`: of
    torchrun; for an elastic job, those of the job."""
    needs = job.needs
    restarts = job.elastic.restarts if job.elastic else restarts
    device = "cpu" if needs.is_cpu else "cuda"
    arguments = [("--out", job.run), ("--data", job.data), ("--device", device)]
    mode = ("--elastic", "--gather", str(job.elastic.gather_s)) if job.elastic else ("--resume",)
    lines = [shlex.join(words) for words in (*arguments, mode, *job.arguments)]
    text = script(
        "node.sh.j2",
        place=place,
        host=host,
        name=job.name,
        nodes=needs.nodes,
        least=job.elastic.least if job.elastic else 0,
        meeting=QuotedText(MEETING),
        restarts=restarts,
        ranks=needs.ranks_per_node,
        port=job.port,
        python=job.python,
        builds=[QuotedText(shlex.join(build)) for build in job.builds],
        environment=sorted(job.environment.items()),
        arguments=[QuotedText(line) for line in lines],
    )
    return LaunchFile(NODE_SCRIPT, text, "the script that every node runs", is_program=True)


LAUNCHERS = {
    "torchrun": Launcher("a script to start by hand on each node", torchrun, takes=("restarts", "elastic", "gather")),
    "slurm": Launcher(
        "a batch script",
        slurm,
        takes=(
            *("time", "lead", "partition", "account", "qos", "constraint", "gres", "sbatch", "image", "mount"),
            *("restarts", "elastic", "gather"),
        ),
        needs={"time": "the time limit of the job, as 24:00:00"},
    ),
    "kubernetes": Launcher(
        "a JobSet",
        kubernetes,
        takes=("image", "volume", "mount", "namespace", "resource", "field", "grace", "restarts"),
        needs={
            "image": "a container image that has dsc",
            "volume": "a PersistentVolumeClaim that all pods can write to",
        },
        is_remote=True,
    ),
    "skypilot": Launcher(
        "a managed job",
        skypilot,
        takes=("image", "volume", "mount", "infra", "accelerator", "field", "restarts"),
        needs={"image": "a container image that has dsc", "volume": "a volume of SkyPilot that all nodes can write to"},
        is_remote=True,
    ),
}

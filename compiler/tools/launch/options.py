"""Parsers of the options of `dsc launch`. They refuse values that the launcher would misread."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from compiler.tools.launch.job import LaunchError

LABEL_MOST = 40  # characters; pod names have at most 63, and a JobSet adds to them
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")  # a Kubernetes object name, RFC 1123
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:/@%+=|&()\[\]*-]*", re.ASCII)  # no blanks or quotes
_INTERFACE = re.compile(r"[=^]?[A-Za-z0-9_.,:-]+", re.ASCII)  # NCCL takes `=eth0` and `^docker` too
_IMAGE = re.compile(r"/?[A-Za-z0-9][A-Za-z0-9_./:@#+-]*", re.ASCII)
_REGISTRY = re.compile(r"((?:[^/]*[.:][^/]*|localhost))/(.+)")  # a host has a dot or a port
_SBATCH = re.compile(r"(?:--)?([a-z][a-z0-9-]*)(?:=(.+))?", re.ASCII)
_FIELD = re.compile(r"([a-z][A-Za-z_]*)=(.+)", re.ASCII)
# sbatch options that the script sets, or that would run something else. getopt also accepts prefixes of them.
OWN = (
    *("array", "constraint", "account", "gpus", "gpus-per-node", "gres", "job-name", "no-kill", "no-requeue", "nodes"),
    *("ntasks", "ntasks-per-node", "open-mode", "partition", "qos", "requeue", "signal", "time", "wrap"),
)
_MOUNT = re.compile(r"/[A-Za-z0-9_./-]+", re.ASCII)
_RESOURCE = re.compile(r"([A-Za-z0-9.-]+/)?[A-Za-z0-9_.-]+", re.ASCII)
_TIMES = (  # time formats of sbatch: minutes, minutes:seconds, hours:…, days-hours, days-hours:…
    (re.compile(r"(\d{1,9})"), (60,)),
    (re.compile(r"(\d{1,9}):(\d{1,2})"), (60, 1)),
    (re.compile(r"(\d{1,9}):(\d{1,2}):(\d{1,2})"), (3600, 60, 1)),
    (re.compile(r"(\d{1,6})-(\d{1,2})"), (86400, 3600)),
    (re.compile(r"(\d{1,6})-(\d{1,2}):(\d{1,2})"), (86400, 3600, 60)),
    (re.compile(r"(\d{1,6})-(\d{1,2}):(\d{1,2}):(\d{1,2})"), (86400, 3600, 60, 1)),
)


def label_of(run: str) -> str:
    """Return the name of a run as a label for schedulers: lowercase letters, digits and dashes."""
    label = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:LABEL_MOST].rstrip("-")
    return label if _LABEL.fullmatch(label) else f"run-{label}".rstrip("-")


def label(text: str) -> str:
    """--name."""
    if not _LABEL.fullmatch(text) or len(text) > LABEL_MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a job name: lowercase letters, digits and dashes, a letter first, at most {LABEL_MOST}"
        )
    return text


def object_name(text: str) -> str:
    """Parse the name of a Kubernetes or SkyPilot object."""
    if not _NAME.fullmatch(text) or len(text) > 253:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name: lowercase letters, digits, dashes and dots")
    return text


def image(text: str) -> str:
    """--image."""
    if not _IMAGE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a container image: registry/name:tag, or a file on Slurm")
    return text


def registry_image(text: str) -> str:
    """Check --image of a launcher that pulls from a registry. Raises LaunchError."""
    if text.startswith("/") or "#" in text:
        raise LaunchError(f"--image {text} is not an image in a registry", "give registry/name:tag")
    return text


def enroot_image(text: str) -> str:
    """Return an image in the notation of Pyxis: a file, or registry#name:tag."""
    match = None if text.startswith("/") or "#" in text or "://" in text else _REGISTRY.fullmatch(text)
    return f"{match[1]}#{match[2]}" if match else text


def mount(text: str) -> str:
    """--mount."""
    if not _MOUNT.fullmatch(text) or ".." in text.split("/"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a folder in a container: give an absolute path, such as /mnt/dsc"
        )
    return text.rstrip("/")


def interface(text: str) -> str:
    """Parse --interface and --hca: names, as NCCL lists them."""
    if not _INTERFACE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of interfaces, such as eth0 or mlx5_0,mlx5_1")
    return text


def variable(text: str) -> tuple[str, str]:
    """Parse --env NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def resource(text: str) -> tuple[str, int]:
    """Parse --resource NAME=COUNT."""
    name, _, count = text.partition("=")
    if not _RESOURCE.fullmatch(name) or not re.fullmatch("[1-9][0-9]{0,5}", count, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COUNT, such as rdma/ib=1")
    return name, int(count)


def time_limit(text: str) -> str:
    """Parse --time, in a format of sbatch."""
    if text.upper() != "UNLIMITED" and (seconds_of(text) or 0) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of sbatch: MINUTES, HH:MM:SS or DAYS-HH:MM:SS")
    return text


def seconds_of(time: str) -> int | None:
    """Return a time limit in seconds; None if there is none."""
    for form, units in _TIMES:
        if match := form.fullmatch(time):
            return sum(int(part) * unit for part, unit in zip(match.groups(), units, strict=True))
    return None


def number(low: int, high: int, meaning: str) -> type[int]:
    """Return an argparse type for an integer in a range."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text, re.ASCII) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {meaning}, from {low:,} to {high:,}")
        return int(text)

    return parse  # type: ignore[return-value]  # argparse calls it as a type


def sbatch(text: str) -> str:
    """Parse --sbatch NAME[=VALUE], an additional #SBATCH line."""
    match = _SBATCH.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a long option of sbatch: NAME=VALUE, such as reservation=maintained"
        )
    name, value = match.groups()
    if owned := next((option for option in OWN if option.startswith(name)), None):
        raise argparse.ArgumentTypeError(f"{text!r}: the build or an option of dsc launch sets --{owned}")
    if value is None:
        return f"--{name}"
    if not _LINE.fullmatch(value):
        raise argparse.ArgumentTypeError(f"{text!r} has characters that a line of #SBATCH cannot hold")
    return f"--{name}={value}"


def field(text: str) -> tuple[str, Any]:
    """Parse --field NAME=JSON. A word that is not JSON is a string."""
    match = _FIELD.fullmatch(text)
    if match is None or not text.isprintable():
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=JSON, such as nodeSelector={{"pool": "train"}}')
    name, value = match.groups()
    try:
        return name, json.loads(value, parse_constant=_no_number)
    except RecursionError:
        raise argparse.ArgumentTypeError(f"{name} is nested too deeply") from None
    except ValueError:
        if re.fullmatch(r"[A-Za-z0-9_.+-]+", value, re.ASCII):
            return name, value
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=JSON: the value of {name} is not JSON") from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def includes_devices(text: str, devices: int) -> bool:
    """Whether --gres includes the devices. Raises LaunchError if their number differs from the build's."""
    words = [word.split(":") for word in check_line("--gres", text).split(",")]
    counts = [int(fields[-1]) if fields[-1].isdecimal() else 1 for fields in words if fields[0] == "gpu"]
    if counts and sum(counts) != devices:
        raise LaunchError(
            f"--gres {text} has {sum(counts)} devices, but the build needs {devices} on each node",
            f"use gpu:{devices}, or compile for the devices you have: dsc compile --on",
        )
    return bool(counts)


def check_line(option: str, value: str) -> str:
    """Check a value for an #SBATCH line, which has its own quoting and comments. Raises LaunchError."""
    if not _LINE.fullmatch(value):
        raise LaunchError(f"{option} {value!r} has characters that a line of #SBATCH cannot hold")
    return value

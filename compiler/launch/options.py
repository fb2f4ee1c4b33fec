"""What the options of `dsc launch` take. Each refuses what its launcher would read as something else."""

from __future__ import annotations

import argparse
import re

from compiler.launch.job import LaunchError

LABEL_MOST = 40  # characters: pods of a JobSet have names of at most 63, some of them the JobSet's own
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")  # of an object of Kubernetes, RFC 1123
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:/@%+=|&()\[\]*-]*", re.ASCII)  # neither blanks nor quotes
_INTERFACE = re.compile(r"[=^]?[A-Za-z0-9_.,:-]+", re.ASCII)  # NCCL takes `=eth0` and `^docker` too
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*", re.ASCII)
_MOUNT = re.compile(r"/[A-Za-z0-9_./-]+", re.ASCII)
_RESOURCE = re.compile(r"([A-Za-z0-9.-]+/)?[A-Za-z0-9_.-]+", re.ASCII)
_TIMES = (  # of sbatch: minutes, minutes:seconds, hours:…, days-hours, days-hours:…
    (re.compile(r"(\d{1,9})"), (60,)),
    (re.compile(r"(\d{1,9}):(\d{1,2})"), (60, 1)),
    (re.compile(r"(\d{1,9}):(\d{1,2}):(\d{1,2})"), (3600, 60, 1)),
    (re.compile(r"(\d{1,6})-(\d{1,2})"), (86400, 3600)),
    (re.compile(r"(\d{1,6})-(\d{1,2}):(\d{1,2})"), (86400, 3600, 60)),
    (re.compile(r"(\d{1,6})-(\d{1,2}):(\d{1,2}):(\d{1,2})"), (86400, 3600, 60, 1)),
)


def label_of(run: str) -> str:
    """The name of a run as schedulers take it: small letters, digits and dashes."""
    label = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:LABEL_MOST].rstrip("-")
    return label if _LABEL.fullmatch(label) else f"run-{label}".rstrip("-")


def label(text: str) -> str:
    """--name."""
    if not _LABEL.fullmatch(text) or len(text) > LABEL_MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name of a job: small letters, digits and dashes, a letter first, {LABEL_MOST} at most"
        )
    return text


def object_name(text: str) -> str:
    """A name of Kubernetes or SkyPilot."""
    if not _NAME.fullmatch(text) or len(text) > 253:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name there: small letters, digits, dashes and dots")
    return text


def image(text: str) -> str:
    """--image."""
    if not _IMAGE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a container image: registry/name:tag")
    return text


def mount(text: str) -> str:
    """--mount."""
    if not _MOUNT.fullmatch(text) or ".." in text.split("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder of a container: an absolute path, as /mnt/dsc")
    return text.rstrip("/")


def interface(text: str) -> str:
    """--interface and --hca: names, as NCCL lists them."""
    if not _INTERFACE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} are not names of interfaces: as eth0, or mlx5_0,mlx5_1")
    return text


def variable(text: str) -> tuple[str, str]:
    """--env NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def resource(text: str) -> tuple[str, int]:
    """--resource NAME=COUNT."""
    name, _, count = text.partition("=")
    if not _RESOURCE.fullmatch(name) or not re.fullmatch("[1-9][0-9]{0,5}", count, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COUNT, as rdma/ib=1")
    return name, int(count)


def time_limit(text: str) -> str:
    """--time, as sbatch reads it."""
    if text.upper() != "UNLIMITED" and (seconds_of(text) or 0) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of sbatch: MINUTES, HH:MM:SS or DAYS-HH:MM:SS")
    return text


def seconds_of(time: str) -> int | None:
    """Seconds of a time limit; None: there is none."""
    for form, units in _TIMES:
        if match := form.fullmatch(time):
            return sum(int(part) * unit for part, unit in zip(match.groups(), units, strict=True))
    return None


def number(low: int, high: int, what: str) -> type[int]:
    """A type of argparse: an integer in a range."""

    def parsed(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text, re.ASCII) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}, from {low:,} to {high:,}")
        return int(text)

    return parsed  # type: ignore[return-value]  # argparse calls it as a type


def checked_line(option: str, value: str) -> str:
    """A value that goes into a line of `#SBATCH`, which has its own quotes and comments. LaunchError."""
    if not _LINE.fullmatch(value):
        raise LaunchError(f"{option} {value!r} has characters that a line of #SBATCH cannot hold")
    return value

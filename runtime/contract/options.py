"""Options of a run, for `dsc train` and the launchers below it. No torch."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from runtime.system.outcome import shorten

PROFILED = 5  # steps
HANG_TIMEOUT_S = 300.0
START_TIMEOUT_S = 60.0  # ranks start together, but imports and disks differ in speed
FOREVER_S = 20 * 24 * 3600.0  # in milliseconds it fits into 32 bits
DEBUG_SUFFIX = "-debug"  # of the default folder of a debug run
EXIT_REPLACED = 76  # from the launcher to dsc train: the folder holds another build than the compiled one


EXIT_EARLIER = 77  # from the launcher to dsc train: an earlier phase has not ended


def run_name(name: str) -> str:
    """Return the run of a build from its name: RUN, or RUN.PHASE for a phase after the first."""
    return name.partition(".")[0]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --out, --steps, --resume, --skip-batch, --data, --device, --transport, --hang-timeout, --start-timeout,
    --restarts, --elastic, --gather, --no-copies, --profile, --debug, --debug-rank, --expect."""
    parser.add_argument("--out", type=_run_folder, metavar="RUN", help="run folder; default: runs/<run>")
    parser.add_argument("--steps", type=_positive, metavar="N", help="end after step N instead of the spec's last")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint of the run folder, if it has one"
    )
    parser.add_argument(
        "--skip-batch",
        action="store_true",
        help="with --resume: skip the samples for which the loss was not finite",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder that the data's paths are relative to")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "shared"),
        default="cpu",
        help="cuda: one device per rank; auto: cuda if there are enough devices, else cpu; shared: all ranks on one"
        " device, for tests",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "memory", "gloo"),
        default="auto",
        help="how ranks communicate if they have no device each: memory: shared memory of one machine; gloo; auto:"
        " memory inside a machine, gloo between machines",
    )
    parser.add_argument(
        "--hang-timeout",
        type=_seconds,
        default=HANG_TIMEOUT_S,
        metavar="S",
        help="end the run if no rank makes progress for S seconds; `none`: never",
    )
    parser.add_argument(
        "--start-timeout",
        type=_seconds,
        default=START_TIMEOUT_S,
        metavar="S",
        help="end the run if a rank starts more than S seconds after another; `none`: never",
    )
    parser.add_argument(
        "--restarts",
        type=_restarts,
        default=0,
        metavar="N",
        help="after a failure restart the ranks, up to N times without a new checkpoint in between; default: 0",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="under torchrun: continue with as many ranks as it starts, compiling the run for them; implies --resume."
        " With --restarts: continue without the device of a rank that fails repeatedly",
    )
    parser.add_argument(
        "--gather",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="with --elastic: if ranks of the build are missing, wait for them until S seconds after the start of"
        " torchrun; default: 0",
    )
    parser.add_argument(
        "--no-copies",
        action="store_true",
        help="do not use the places of `checkpoint { to }`: copy no checkpoint to them, and restore none from them",
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        type=_positive,
        const=PROFILED,
        metavar="N",
        help=f"profile N steps ({PROFILED} by default) after warm-up steps, print where their time goes, and end",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="connect one rank to the terminal, for print and breakpoint() in an edited build; saves no checkpoint",
    )
    parser.add_argument(
        "--debug-rank", type=_rank, default=0, metavar="R", help="the rank that --debug connects; default: 0"
    )
    parser.add_argument(
        "--expect", type=_digest, metavar="SHA256", help="train only the build with this digest, from dsc compile"
    )


def _digest(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the digest of a build: 64 hexadecimal digits, as dsc compile prints them"
        )
    return text


def _rank(text: str) -> int:
    if not re.fullmatch("[0-9]{1,7}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank: ranks are numbers from 0")
    return int(text)


def _run_folder(text: str) -> Path:
    """Parse the path of a run folder, which may not exist yet."""
    if not text:
        raise argparse.ArgumentTypeError("the run folder has no name")
    if not _is_unicode(text):  # torch supports no other file names
        raise argparse.ArgumentTypeError(f"{shorten(text)} cannot be a run folder: its name is not text in UTF-8")
    longest = Path(text, "checkpoints", ".tmp-00000000", "shard.00000.safetensors")
    try:
        longest.lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{shorten(text)} cannot be a run folder: {reason}") from None
    return Path(text)


def _is_unicode(text: str) -> bool:
    """Whether a name is valid UTF-8. Python represents invalid bytes as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _seconds(text: str) -> float | None:
    """Parse a finite number above 0, or `none` as None."""
    if text == "none":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0; `none` waits forever")
    return seconds


def _restarts(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts: an integer from 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps: an integer from 1")
    return int(text)

"""`dsc train [SPEC[:RUN] | BUILD] [--steps N] [--out RUN]`: compile what is stale, then run the ranks.

dsc train                          the one spec of this folder → runs/<run>
dsc train spec.dsc --steps 20 -s train.batch=32
dsc train build/quickstart --resume
dsc train --profile                where the time of a step goes

Exit codes: 0 done · 1 a rank failed · 2 the spec, the data or the command line is wrong · 3 hung, or an error of dsc ·
128 + signal when asked to stop, after a checkpoint
"""

# This process imports no torch: it starts the compiler and the ranks, and writes the report when they have ended.

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from compiler.commands.common import EXIT_SPEC, Chosen, add_spec_arguments, is_refused, load_spec
from compiler.commands.compile import add_cache
from compiler.emit.files import versions
from compiler.rates.own import own_table
from compiler.report.run import write_run_report
from compiler.schedules.own import BUILT, PLACED, RATED, standing_alone
from dsl.format import canonical
from runtime.options import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser, "a spec file, SPEC:RUN, or a build folder; default: the spec in the current folder")
    add_options(parser)
    add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Train, whether or not anybody reads what is printed.

    Returns the exit code of the ranks (see runtime/outcome.py), or 2 where there is nothing that could be trained.
    """
    _open_streams()
    build, data, name = Path(args.spec or ""), args.data, None
    if args.spec and (build / "manifest.json").is_file():
        if args.set:
            print(f"error: {build} is compiled already: -s needs the spec", file=sys.stderr)
            return EXIT_SPEC
    else:
        chosen = load_spec(args.spec, args.set)
        if chosen is None or is_refused(chosen):
            return EXIT_SPEC
        build, name = Path("build") / chosen.spec.name, chosen.spec.name
        data = data or chosen.path.parent
        if _stale(build, chosen) and (code := _compile(args, chosen, build)):
            return code
    out = args.out or Path("runs") / (name or _name(build))
    command = [sys.executable, "-P", "-m", "runtime.train", str(build), "--out", str(out)]
    command += ["--data", str(data or Path.cwd()), "--hang-timeout", str(args.hang_timeout), "--device", args.device]
    command += ["--transport", args.transport]
    command += ["--steps", str(args.steps)] if args.steps is not None else []
    command += ["--resume"] if args.resume else []
    command += ["--profile", str(args.profile)] if args.profile is not None else []
    code = _call(command)
    if code != EXIT_SPEC and (out / "metrics.jsonl").is_file():  # at 2 there was no run
        report = write_run_report(out)
        if args.profile is not None and code == 0:
            _say_profile(out)
        _say(f"report: {report}\nrun: {out}")
    return code


def _open_streams() -> None:
    """Standard streams that are closed lead nowhere, so that no file opened later takes their place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # nobody reads, or the disk is full: the exit code is still that of the training
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


def _say_profile(run: Path) -> None:
    from compiler.picture.formats import screen_of  # only a profile waits for these
    from compiler.report.profile import write_run_profile
    from compiler.report.profile_text import text

    _say(text(write_run_profile(run), screen_of(sys.stdout)) + f"profile: {run / 'profile.json'}")


def _name(build: Path) -> str:
    """The run of a build; if it cannot be read, the folder's name: the ranks' launcher will say what is wrong."""
    try:
        return str(json.loads((build / "plan.json").read_text("utf-8"))["run"])
    except (OSError, ValueError, KeyError):
        return build.resolve().name


def _stale(build: Path, chosen: Chosen) -> bool:
    """Whether the build folder is of another spec, or was emitted by other versions than are installed."""
    try:
        text = (build / "spec.resolved").read_text("utf-8")
        made_by = json.loads((build / "manifest.json").read_text("utf-8"))["versions"]
    except (OSError, ValueError, KeyError):
        return True
    if made_by != versions() or text != canonical(standing_alone(chosen.spec)):
        return True
    if chosen.placement is not None and (build / PLACED).read_text("utf-8") != chosen.placement.text:
        return True
    table = own_table(chosen.spec)
    if table is not None and (build / RATED).read_text("utf-8") != table.to_json():
        return True
    return chosen.own is not None and (build / BUILT).read_text("utf-8") != chosen.own.to_text()


def _compile(args: argparse.Namespace, chosen: Chosen, build: Path) -> int:
    command = [sys.executable, "-P", "-m", "compiler.cli", "compile", args.spec or str(chosen.path), "-o", str(build)]
    command += ["--cache", str(args.cache)] if args.cache is not None else []
    return _call([*command, *(word for override in args.set for word in ("-s", override))])


def _call(command: Sequence[str]) -> int:
    """Run a process that ends with this one, pass signals on to it, and give its exit code."""
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=_die_with_parent,
    )

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

"""`dsc train [SPEC[:RUN] | BUILD] [--steps N] [--out RUN]`: compile what is stale, then run the ranks.

dsc train                          the one spec of this folder → runs/<run>
dsc train spec.dsc --steps 20 -s train.batch=32
dsc train build/quickstart --resume
dsc train --profile                where the time of a step goes

Exit codes: 0 done · 1 a rank failed · 2 the spec, the data or the command line is wrong · 3 hung, or an error of dsc ·
128 + signal when asked to stop, after a checkpoint
"""

# This process imports no torch: it starts the compiler, and the launcher of the ranks, which prepares the data
# meanwhile; and it writes the report when they have ended.

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from compiler.commands.common import EXIT_SPEC, Chosen, add_spec_arguments, is_refused, load_spec
from compiler.commands.compile import add_cache
from compiler.commands.train_processes import call, call_both
from compiler.emit.files import versions
from compiler.emit.folder import check_place
from compiler.rates.own import own_table
from compiler.schedules.own import BUILT, PLACED, RATED, standing_alone
from dsl.format import canonical
from dsl.schema import Spec
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
    compiler: list[str] = []
    parts = ""
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
        if _stale(build, chosen):
            compiler, parts = _compiler(args, chosen, build), _parts(chosen.spec)
    out = args.out or Path("runs") / (name or _name(build))
    launcher = ["runtime.train", str(build), "--out", str(out), "--data", str(data or Path.cwd())]
    launcher += ["--hang-timeout", str(args.hang_timeout), "--device", args.device, "--transport", args.transport]
    launcher += ["--steps", str(args.steps)] if args.steps is not None else []
    launcher += ["--resume"] if args.resume else []
    launcher += ["--profile", str(args.profile)] if args.profile is not None else []
    if compiler and _can_begin(build):
        code, built = call_both(compiler, [*launcher, "--unbuilt"], parts)
        if not built:
            return code
    elif code := call(compiler) if compiler else 0:
        return code
    else:
        code = call(launcher)
    if code != EXIT_SPEC and (out / "metrics.jsonl").is_file():  # at 2 there was no run
        from compiler.report.run import write_run_report  # until now it would only have kept the ranks waiting

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


def _compiler(args: argparse.Namespace, chosen: Chosen, build: Path) -> list[str]:
    command = ["compiler.cli", "compile", args.spec or str(chosen.path), "-o", str(build)]
    command += ["--cache", str(args.cache)] if args.cache is not None else []
    return [*command, *(word for override in args.set for word in ("-s", override))]


def _parts(spec: Spec) -> str:
    """What of its plan the launcher needs to prepare the data, in a line of JSON."""
    train, model = {"seed": spec.train.seed}, {"vocab": spec.model.vocab}
    return json.dumps({"data": spec.data.model_dump(mode="json"), "model": model, "train": train})


def _can_begin(build: Path) -> bool:
    """Whether the data can be prepared while the spec is compiled. Not where the compiler will have nowhere to put the
    build, and will say so; nor for one rank of torchrun's, which shares the data with others."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return False
    try:
        check_place(build)
    except OSError:
        return False
    return True

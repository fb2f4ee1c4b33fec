"""Train a build: `python -P -m runtime.train BUILD --out RUN`, or `torchrun --nproc-per-node W BUILD/train.py`.

Alone, it prepares the data, then forks one rank per device and watches them; under torchrun it is one rank. Exit codes:
0 trained · 1 a rank failed · 2 the build, the data or the run folder cannot be used · 3 hung · 128 + signal when asked
to stop.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.build import Build, BuildError
from runtime.options import add_options

EXIT_USAGE = 2


@dataclass(frozen=True)
class Options:
    """What a run is asked for beyond its build."""

    run: Path
    data: Path  # folder that the data's paths are relative to
    steps: int | None
    resume: bool
    hang_timeout_s: float


def main(argv: Sequence[str] | None = None, build: Path | None = None) -> int:
    """`build`: the folder, where the caller is its own train.py."""
    args = _parse(argv, build)
    try:
        opened = Build.open(args.build)
    except BuildError as error:
        return _fail(str(error))
    run = args.out or Path("runs") / opened.plan["run"]
    options = Options(run, args.data or Path.cwd(), args.steps, args.resume, args.hang_timeout)
    if not options.resume and (run / "checkpoints").exists():
        return _fail(f"{run} holds an earlier run: go on with --resume, or name another folder with --out")
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return _join(opened, options)
    return _supervise(opened, options)


def _parse(argv: Sequence[str] | None, build: Path | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runtime.train" if build is None else "train.py")
    if build is None:
        parser.add_argument("build", type=Path, metavar="BUILD", help="folder written by dsc compile")
    add_options(parser)
    return parser.parse_args(argv, argparse.Namespace(build=build))


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _supervise(build: Build, options: Options) -> int:
    corpus = _prepare(build, options)
    if corpus is None:
        return EXIT_USAGE
    from runtime.launch import RunFolderBusyError, launch  # imports torch, once for all ranks
    from runtime.loop import Loop

    loop = Loop(build, options.run, corpus, options.steps, options.resume)
    world = build.plan["mesh"]["pp"] * build.plan["mesh"]["dp"]
    view = loop.progress()
    try:
        outcome = launch(loop.rank, world, folder=options.run, on_poll=view.poll, hang_timeout_s=options.hang_timeout_s)
    except (RunFolderBusyError, OSError) as error:
        return _fail(str(error))
    finally:
        view.close()
    if not outcome.ok:
        print(f"error: {outcome}", file=sys.stderr)
    return outcome.exit_code


def _prepare(build: Build, options: Options) -> Path | None:
    """The prepared corpus, made by a process of its own: the tokenizer's threads must not exist where ranks fork."""
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "runtime.prepare",
            str(build.folder),
            str(options.data),
            str(options.run / "data"),
        ],
        stdout=subprocess.PIPE,
        check=False,
    )
    return Path(json.loads(done.stdout)["folder"]) if done.returncode == 0 else None


def _join(build: Build, options: Options) -> int:
    """One rank under torchrun. The first to ask prepares the data, the others wait for it."""
    from runtime.launch import attach
    from runtime.loop import Loop
    from runtime.prepare import prepare_build

    corpus = prepare_build(build, options.data, options.run / "data")
    loop = Loop(build, options.run, corpus, options.steps, options.resume)
    assert attach(loop.rank)
    return 0


if __name__ == "__main__":
    sys.exit(main())

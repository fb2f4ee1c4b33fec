"""`dsc compile [SPEC[:RUN]] [-o BUILD]`: compile a spec into a build folder.

dsc compile                        the one spec of this folder → build/<run>
dsc compile spec.dsc:ablation -o build/wide -s model.hidden=512
dsc compile spec.dsc --cache ~/.cache/dsc
dsc compile spec.dsc --on 2x8      for 2 nodes of 8 devices, keeping as much of the plan as possible

Traced segments and action orders are reused from BUILD/cache, or from the folder of --cache, which builds can share.
Each phase of a run has its own build: build/<run>, build/<run>.<phase>.

Exit codes: 0 done · 2 the spec is wrong or cannot be trained yet · 3 an internal error of dsc: its proof refuses the
program · 75 the disk is full: try again later
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.cli.commands.common import (
    EXIT_BUG,
    EXIT_SPEC,
    add_budget,
    add_spec_arguments,
    is_refused,
    load_phases,
    progress,
    report_error,
    say,
)
from compiler.emit.folder import check_place, write_build
from compiler.predict.choose import ChosenSpec, Patience
from runtime.build.files import CACHE
from runtime.contract.options import run_name
from runtime.system.outcome import refusal_code

if TYPE_CHECKING:
    from compiler.pipeline import CompiledBuild
    from dsl.schema import Spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)
    add_budget(parser)
    parser.add_argument(
        "-o", "--out", metavar="BUILD", type=Path, help="build folder; default: build/<run>, or build/<run>.<phase>"
    )
    parser.add_argument(
        "--on", metavar="NxD", type=_devices, help="compile for N nodes of D devices instead of the spec's cluster"
    )
    caches = parser.add_mutually_exclusive_group()
    add_cache(caches)
    caches.add_argument("--no-cache", action="store_true", help="trace and search everything anew, and store nothing")
    parser.add_argument("--digest-to", metavar="FD", type=int, help=argparse.SUPPRESS)  # of dsc train
    parser.set_defaults(at_once=True, uncollected=True)  # cli.main exits right after the last line


def run(args: argparse.Namespace) -> int:
    """Compile each phase of the run. Returns the exit code."""
    phases = load_phases(args.spec, args.set, patience=Patience(args.budget))
    if phases is not None and args.on is not None:
        phases = _phases_on_devices(args, phases)
    if phases is None or any([is_refused(phase) for phase in phases]):
        return EXIT_SPEC
    for phase in phases:
        name = phase.spec.name
        suffix = name.removeprefix(run_name(name)) if len(phases) > 1 else ""
        folder = Path("build") / name if args.out is None else args.out.parent / f"{args.out.name}{suffix}"
        if code := _compile(args, phase.spec, folder):
            return code
    return 0


def _devices(text: str) -> tuple[int, int]:
    """`2x8` → (2, 8)."""
    match = re.fullmatch("([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not nodes x devices, as in `2x8`")
    return int(match[1]), int(match[2])


def _phases_on_devices(args: argparse.Namespace, phases: Sequence[ChosenSpec]) -> list[ChosenSpec] | None:
    """The phases on the devices of --on. Returns None after printing why that is not possible."""
    from compiler.predict.search import RefitError, refit_overrides
    from dsl.load import alternatives, variants

    first, (nodes, devices) = phases[0], args.on

    def has_plan(settings: tuple[str, ...]) -> bool:
        return next(alternatives(first.argument, None, [*args.set, *settings]), None) is not None

    try:
        overrides = refit_overrides(first.spec, nodes, devices, variants(first.argument, None, args.set), has_plan)
    except RefitError as error:
        say(f"error: --on {nodes}x{devices}: {error}")
        return None
    say("on these devices: " + " ".join(f"-s {override}" for override in overrides))
    return load_phases(args.spec, [*args.set, *overrides], patience=Patience(args.budget))


def _compile(args: argparse.Namespace, spec: Spec, out: Path) -> int:
    """Compile one phase of a run into a build folder. Returns the exit code."""
    from compiler.emit.segment_cache import Segments
    from compiler.pipeline import compile_spec  # imported only for a valid spec
    from compiler.plan.actions.order import Orders
    from compiler.predict.torch_share import SlowOpsError
    from compiler.program.proof import ProofError
    from compiler.tools.report.page import build_pages

    tell = progress("compile")
    build_cache = out / CACHE
    cache = None if args.no_cache else args.cache or build_cache
    try:
        check_place(out)  # before the work
        if args.cache is not None and args.cache.exists() and not args.cache.is_dir():
            raise NotADirectoryError(f"{args.cache} is a file: choose a folder with --cache")
        build = compile_spec(spec, tell, Segments(cache), Orders(cache), build_pages)
        entries = [(f"{CACHE}/{name}", text) for name, text in build.entries if cache == build_cache]
        write_build(out, (*build.files, *entries))
    except SlowOpsError as error:
        return report_error(str(error))
    except ProofError as error:
        say(f"error: {error}")
        return EXIT_BUG
    except OSError as error:
        say(f"error: {f'{out} cannot be written: {error.strerror}' if error.strerror else error}")
        return refusal_code(error)
    finally:
        tell("")
    print(build.summary, end="", flush=True)
    if build.warning:
        say(f"warning: {build.warning}")
    if args.cache is not None:
        _store(args.cache, build)
    if args.digest_to is not None:
        os.write(args.digest_to, build.digest.encode())
    else:
        print(f"digest: {build.digest}")
    print(f"build: {out}")
    return 0


def add_cache(parser: argparse._ActionsContainer) -> None:
    """The option --cache."""
    parser.add_argument(
        "--cache",
        metavar="DIR",
        type=Path,
        help="keep traced segments, action orders and prepared data here, shared by all builds and runs",
    )


def _store(folder: Path, build: CompiledBuild) -> None:
    """Store traced segments and action orders in a cache. Failure is only a warning: the build is written already."""
    from compiler.files.cache import store

    try:
        store(folder, build.entries)
    except OSError as error:
        say(f"warning: nothing is cached in {folder}: {error.strerror or error}")

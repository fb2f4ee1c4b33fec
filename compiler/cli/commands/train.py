"""`dsc train [SPEC[:RUN] | BUILD] [--steps N] [--out RUN]`: compile what is stale, then run the ranks.

dsc train                          the one spec of this folder → runs/<run>
dsc train spec.dsc --steps 20 -s train.batch=32
dsc train build/quickstart --resume
dsc train --profile                where the time of a step goes
dsc train build/quickstart --debug an edited build, with print and breakpoint()

The phases of a run are trained one after the other, each from the last checkpoint of the one before; with --resume from
the phase on that the newest checkpoint is of.

The report is written after a run that came to its end; after any other `dsc report RUN` writes it, for exit codes
must not wait.

Exit codes: 0 done · 1 a rank failed · 2 the spec, the data or the command line is wrong · 3 hung, or an error of dsc ·
75 the run folder is busy, the disk is full or the preparation of the data was killed: try again later · 128 + signal
when asked to stop, after a checkpoint, or when a process of the run was killed
"""

# This process imports no torch: it starts the compiler, and the launcher of the ranks, which prepares the data
# meanwhile; and it writes the report when they have come to their end.

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from compiler.cli.commands.common import EXIT_SPEC, add_spec_arguments, is_refused, load_phases, reason, say, wrong
from compiler.cli.commands.compile import add_cache
from compiler.cli.commands.train_processes import call, call_both, compiled
from compiler.emit.folder import check_place
from compiler.emit.recipe import data_request
from compiler.plan.spec_files import standing_alone, texts_of_files
from compiler.predict.choose import Chosen
from dsl.canonical import canonical
from dsl.load import analyse
from dsl.messages.diagnostics import SpecError
from dsl.resolve.files import over
from dsl.schema import Spec
from dsl.schema.cluster import Cluster
from runtime.build.files import MANIFEST, BuildError, read, versions
from runtime.checkpoint.shard_manifest import CheckpointError, find_manifest, trained_tokens
from runtime.contract import Plan
from runtime.contract.options import DEBUG_SUFFIX, EXIT_EARLIER, EXIT_REPLACED, add_options, run_name
from runtime.system.outcome import EXIT_RETRY, printable
from runtime.system.streams import open_streams, tell
from runtime.system.strict_json import FormError, tree

RESOLVED = "spec.resolved"
TRIES = 20  # to compile and to start, where others compile into the same folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser, "a spec file, SPEC:RUN, or a build folder; default: the spec in the current folder")
    add_options(parser)
    add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Train, whether or not anybody reads what is printed.

    Returns the exit code of the ranks (see runtime/system/outcome.py), or 2 where there is nothing that could be
    trained.
    """
    open_streams()
    if args.spec and os.path.lexists(Path(args.spec) / MANIFEST):
        build = Path(args.spec)
        if args.set:
            print(f"error: {build} is compiled already: -s needs the spec", file=sys.stderr)
            return EXIT_SPEC
        out = _out(args, _name(build))
        cluster = _cluster(build)
        if cluster is not None and (said := _one_machine(cluster, build, out)):
            tell(said)
        code, launched = call(_launcher(args, build, out, args.data or Path.cwd(), resume=args.resume)), True
    else:
        phases = load_phases(args.spec, args.set)
        if phases is None or any([is_refused(each) for each in phases]):
            return EXIT_SPEC
        if len(phases) > 1 and args.expect is not None:
            first = phases[0].argument
            return wrong("--expect names one build, and this run has several phases", f"name one: `{first}`")
        out = _out(args, phases[0].spec.name)
        code, launched = _train_phases(args, phases, out)
    if not launched or args.debug:  # the numbers of a debug run are for nobody's report
        return code
    if (out / "metrics.jsonl").is_file() and code not in (EXIT_SPEC, EXIT_RETRY):  # at these there was no run
        _finish(out, code, profiled=args.profile is not None)
    return code


def _out(args: argparse.Namespace, name: str) -> Path:
    """The run folder: all phases of a run have one."""
    return args.out or Path("runs") / (run_name(name) + DEBUG_SUFFIX * args.debug)


def _launcher(args: argparse.Namespace, build: Path, out: Path, data: Path, *, resume: bool) -> list[str]:
    """The command that starts the ranks of a build."""
    launcher = ["runtime.run.train", str(build), "--out", str(out), "--data", str(data)]
    launcher += ["--device", args.device, "--transport", args.transport]
    launcher += ["--hang-timeout", str(args.hang_timeout or "none")]
    launcher += ["--start-timeout", str(args.start_timeout or "none")]
    launcher += ["--steps", str(args.steps)] if args.steps is not None else []
    launcher += ["--resume"] if resume else []
    launcher += ["--skip-batch"] if args.skip_batch else []
    launcher += ["--restarts", str(args.restarts)] if args.restarts else []
    launcher += ["--elastic"] if args.elastic else []
    launcher += ["--no-copies"] if args.no_copies else []
    launcher += ["--profile", str(args.profile)] if args.profile is not None else []
    launcher += ["--expect", args.expect] if args.expect is not None else []
    launcher += ["--data-cache", str(cache)] if (cache := _data_cache(args, build)) is not None else []
    return launcher + (["--debug", "--debug-rank", str(args.debug_rank)] if args.debug else [])


def _train_phases(args: argparse.Namespace, phases: Sequence[Chosen], out: Path) -> tuple[int, bool]:
    """Train phase after phase of a run, from the one on that it has come to; the exit code of the last that was
    trained, and whether there may be a run."""
    _, tokens = _reached(out) if args.resume else (0, 0)
    index = sum(each.spec.train.first_token <= tokens for each in phases[1:])
    resume = args.resume
    if not (args.profile or args.debug):
        for each in phases[index + 1 :]:  # a proof that fails is known now, and not after days
            is_reached = args.steps is None or args.steps > each.spec.train.first_step
            code, _ = _compiled(args, each) if is_reached else (0, "")
            if code:
                return code, False
    while True:
        phase = phases[index]
        build = Path("build") / phase.spec.name
        if said := _one_machine(phase.spec.cluster, build, out):
            tell(said)
        launcher = _launcher(args, build, out, args.data or phase.path.parent, resume=resume or index > 0)
        code, launched = _train(args, phase, build, launcher)
        if code == EXIT_EARLIER and index:  # the newest checkpoint is damaged, the one before is not so far
            index, resume = index - 1, True
            continue
        is_over = args.steps is not None and args.steps <= _reached(out)[0]
        if code or not launched or is_over or args.profile or args.debug or index + 1 == len(phases):
            return code, launched
        index += 1


def _reached(out: Path) -> tuple[int, int]:
    """The step of the newest checkpoint of a run folder, and the tokens trained on; zeros where there is none. Its
    shards are for the ranks to verify."""
    try:
        newest = find_manifest(out)[1]
    except CheckpointError:
        return 0, 0
    return newest.step, trained_tokens(newest.meta) or 0


def _compiled(args: argparse.Namespace, chosen: Chosen) -> tuple[int, str]:
    """Compile a phase if its build is stale; the exit code of the compiler, and the digest of the build."""
    build = Path("build") / chosen.spec.name
    digest = fresh(build, chosen.spec)
    return compiled(_compiler(args, chosen, build), quiet=False) if digest is None else (0, digest)


def _finish(out: Path, code: int, *, profiled: bool) -> None:
    """Say where the run is. After exit code 0 write its report first; whatever becomes of that, the run has ended well.

    After a failure nothing is waited for: a restart loop, or whoever is on call, wants the exit code.
    """
    if code == 0 and os.environ.get("RANK", "0") == "0":  # under torchrun, one of its ranks
        tell(_report(out, profiled=profiled))
    elif code:
        tell(f"report: dsc report {shlex.quote(str(out))}")
    tell(f"run: {out}")


def _report(out: Path, *, profiled: bool) -> str:
    """Write the report; the line that names it. A report that cannot be written is said on standard error."""
    try:
        # until now it would only have kept the ranks waiting
        from compiler.tools.report.run_page import write_run_report
        from compiler.tools.report.summary import summary_of

        path, report = write_run_report(out)
        if summary := summary_of(report):
            tell("\n".join(map(printable, summary.lines())))
        if profiled:
            _say_profile(out)
    except (Exception, KeyboardInterrupt) as error:
        plain = reason(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        said = printable(plain)
        with suppress(OSError):
            print(f"the report could not be written: {said}", file=sys.stderr, flush=True)
        return f"report: dsc report {shlex.quote(str(out))}"
    return f"report: {path}"


def _train(args: argparse.Namespace, chosen: Chosen, build: Path, launcher: Sequence[str]) -> tuple[int, bool]:
    """Compile what is stale, and start the launcher; the exit code, and whether there may be a run.

    Others may compile another spec into the same folder: where its build is not the one that was compiled or found
    fresh here, all this is done again, and nobody is told, for segments and data are there by then.
    """
    compiler = _compiler(args, chosen, build)
    for attempt in range(TRIES):
        digest = fresh(build, chosen.spec)
        if digest is None and attempt == 0 and not args.debug and _can_begin(build):  # a debugger needs stdin
            code, launched = call_both(compiler, [*launcher, "--unbuilt"], _request(chosen.spec))
            if not launched:
                return code, False
        else:
            if digest is None:
                code, digest = compiled(compiler, quiet=attempt > 0)
                if code:
                    return code, False
            code = call([*launcher, "--compiled", digest])
        if code != EXIT_REPLACED:
            return code, True
    say(f"error: others compile into {build} again and again: give this run another name, or compile it with -o")
    return EXIT_SPEC, False


def _say_profile(run: Path) -> None:
    from compiler.tools.picture.formats import screen_of  # only a profile waits for these
    from compiler.tools.report.profile import write_run_profile
    from compiler.tools.report.profile_text import text

    tell(text(write_run_profile(run), screen_of(sys.stdout)) + f"profile: {run / 'profile.json'}")


def _cluster(build: Path) -> Cluster | None:
    """The cluster that a build is for; None where that cannot be read: the ranks' launcher will say what is wrong."""
    try:
        text, path = read(build, edited=True).files[RESOLVED].decode(), os.path.realpath(build / RESOLVED)
        (view,) = analyse(path, reader=over({path: text})).views
    except (BuildError, LookupError, ValueError, SpecError):
        return None
    return view.spec.cluster if view.spec else None


def _one_machine(cluster: Cluster, build: Path, out: Path) -> str:
    """What to know where a spec has several nodes and this process starts all ranks, or ""."""
    nodes = sum(count for count, _ in cluster.parts)
    if nodes == 1 or "RANK" in os.environ:
        return ""
    counts = {machine.devices for _, machine in cluster.parts}
    devices = str(counts.pop()) if len(counts) == 1 else "DEVICES"
    train, run = shlex.quote(str(build / "train.py")), shlex.quote(str(out))
    return (
        f"cluster {cluster.name} has {nodes:,} nodes, and dsc train starts all ranks on this machine; to start them on"
        f" {nodes:,}: dsc compile, then on each"
        f" torchrun --nnodes {nodes} --nproc-per-node {devices} … {train} --out {run} (docs/torchrun.md)"
    )


def _name(build: Path) -> str:
    """The run of a build; if it cannot be read, the folder's name: the ranks' launcher will say what is wrong."""
    try:
        return Plan.from_json(read(build, edited=True).files["plan.json"]).run
    except (BuildError, FormError, KeyError):
        return build.resolve().name


def fresh(build: Path, spec: Spec) -> str | None:
    """The digest of the build in the folder; None where there is none, where it is of another spec, or where it was
    emitted by other versions than are installed. Whether it is whole is for the launcher to say."""
    try:
        found = read(build, edited=True)
    except BuildError:
        return None
    wanted = {RESOLVED: canonical(standing_alone(spec)), **texts_of_files(spec)}
    same = all(found.files.get(name) == text.encode() for name, text in wanted.items())
    return found.digest if same and found.versions == versions() else None


def _compiler(args: argparse.Namespace, chosen: Chosen, build: Path) -> list[str]:
    command = ["compiler.cli.main", "compile", chosen.argument, "-o", str(build)]
    command += ["--cache", str(args.cache)] if args.cache is not None else []
    return [*command, *(word for override in args.set for word in ("-s", override))]


def _data_cache(args: argparse.Namespace, build: Path) -> Path | None:
    """Where runs share prepared data: below --cache, or beside the builds that `dsc train` makes, in build/.data.

    None for a build that is elsewhere: nothing is written beside that.
    """
    if args.cache is not None:
        return Path(args.cache) / "data"
    return build.parent / ".data" if build.parent.resolve() == Path("build").resolve() else None


def _request(spec: Spec) -> str:
    """The request by which the launcher prepares the data while there is no plan, as one line of JSON."""
    return json.dumps(tree(data_request(spec)))


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

"""Training on this machine: compile a stale build, start the ranks, and write the report when they have ended.

`dsc train` and `dsc_trainer.train` call it. This process does not import torch. It starts the compiler, and the
launcher of the ranks, which prepares the data during compilation.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.emit.data_recipe import data_request
from compiler.emit.folder import check_place
from compiler.plan.spec_files import standing_alone, texts_of_files
from compiler.tools.processes import OWN_STREAMS, OutputLines, call, call_both, run_compiler
from dsl.canonical import canonical
from dsl.load import analyse
from dsl.messages.diagnostics import SpecError
from dsl.resolve.files import reader_of_texts
from dsl.schema import Spec
from dsl.schema.cluster import Cluster
from runtime.build.files import BuildError, read, versions
from runtime.checkpoint.shard_manifest import CheckpointError, find_manifest, trained_tokens
from runtime.contract import RunPlan
from runtime.contract.options import (
    DEBUG_SUFFIX,
    EXIT_EARLIER,
    EXIT_REPLACED,
    HANG_TIMEOUT_S,
    START_TIMEOUT_S,
    run_name,
)
from runtime.system.outcome import EXIT_RETRY, EXIT_USAGE, printable
from runtime.system.strict_json import FormError, tree

if TYPE_CHECKING:
    from compiler.predict.choose import ChosenSpec

RESOLVED = "spec.resolved"
TRIES = 20  # attempts to compile and start while others compile into the same folder


@dataclass(frozen=True)
class Training:
    """The options of `dsc train` (runtime/contract/options.py).

    out: the run folder, by default runs/RUN. data: the folder that paths of the data are relative to. changes: of the
    spec, in the form of `-s`. cache: a folder of traced segments and prepared data that builds share.
    """

    out: Path | None = None
    data: Path | None = None
    steps: int | None = None
    resume: bool = False
    device: str = "cpu"
    transport: str = "auto"
    hang_timeout: float | None = HANG_TIMEOUT_S
    start_timeout: float | None = START_TIMEOUT_S
    skip_batch: bool = False
    restarts: int = 0
    elastic: bool = False
    no_copies: bool = False
    profile: int | None = None
    debug: bool = False
    debug_rank: int = 0
    expect: str | None = None
    cache: Path | None = None
    changes: tuple[str, ...] = ()
    output: OutputLines = OWN_STREAMS


@dataclass(frozen=True)
class TrainingEnd:
    """The exit code of `dsc train` (runtime/system/outcome.py), and the run folder, which exists if ranks started."""

    code: int
    run: Path


def train_build(options: Training, build: Path) -> TrainingEnd:
    """Train an existing build."""
    out = _output_folder(options, _name(build))
    cluster = _cluster(build)
    if cluster is not None and (note := _one_machine(cluster, build, out)):
        options.output.tell(note)
    code = call(
        _launcher(options, build, out, options.data or Path.cwd(), resume=options.resume), output=options.output
    )
    return _end_training(options, out, code)


def train_phases(options: Training, phases: Sequence[ChosenSpec]) -> TrainingEnd:
    """Train the phases of a run in order. Most runs have one."""
    out = _output_folder(options, phases[0].spec.name)
    code, launched = _train_phases(options, phases, out)
    return _end_training(options, out, code) if launched else TrainingEnd(code, out)


def _end_training(options: Training, out: Path, code: int) -> TrainingEnd:
    """Report the end of a run, unless it is a debug run."""
    if not options.debug and (out / "metrics.jsonl").is_file() and code not in (EXIT_USAGE, EXIT_RETRY):
        _finish(options, out, code)
    return TrainingEnd(code, out)


def _output_folder(options: Training, name: str) -> Path:
    """Return the run folder, which all phases of a run share."""
    return options.out or Path("runs") / (run_name(name) + DEBUG_SUFFIX * options.debug)


def _launcher(options: Training, build: Path, out: Path, data: Path, *, resume: bool) -> list[str]:
    """Return the command that starts the ranks of a build."""
    launcher = ["runtime.run.train", str(build), "--out", str(out), "--data", str(data)]
    launcher += ["--device", options.device, "--transport", options.transport]
    launcher += ["--hang-timeout", str(options.hang_timeout or "none")]
    launcher += ["--start-timeout", str(options.start_timeout or "none")]
    launcher += ["--steps", str(options.steps)] if options.steps is not None else []
    launcher += ["--resume"] if resume else []
    launcher += ["--skip-batch"] if options.skip_batch else []
    launcher += ["--restarts", str(options.restarts)] if options.restarts else []
    launcher += ["--elastic"] if options.elastic else []
    launcher += ["--no-copies"] if options.no_copies else []
    launcher += ["--profile", str(options.profile)] if options.profile is not None else []
    launcher += ["--expect", options.expect] if options.expect is not None else []
    launcher += ["--data-cache", str(cache)] if (cache := _data_cache(options, build)) is not None else []
    return launcher + (["--debug", "--debug-rank", str(options.debug_rank)] if options.debug else [])


def _train_phases(options: Training, phases: Sequence[ChosenSpec], out: Path) -> tuple[int, bool]:
    """Train the phases of a run from the one it has reached. Returns the exit code of the last phase that was trained,
    and whether ranks were launched."""
    _, tokens = _newest_position(out) if options.resume else (0, 0)
    index = sum(phase.spec.train.first_token <= tokens for phase in phases[1:])
    resume = options.resume
    if not (options.profile or options.debug):
        for later in phases[index + 1 :]:  # so that a proof of a later phase fails now, not after days
            is_reached = options.steps is None or options.steps > later.spec.train.first_step
            code, _ = _compile_phase(options, later) if is_reached else (0, "")
            if code:
                return code, False
    while True:
        phase = phases[index]
        build = Path("build") / phase.spec.name
        if note := _one_machine(phase.spec.cluster, build, out):
            options.output.tell(note)
        launcher = _launcher(options, build, out, options.data or phase.path.parent, resume=resume or index > 0)
        code, launched = _train(options, phase, build, launcher)
        if code == EXIT_EARLIER and index:  # the newest checkpoint is damaged, the one before is of an earlier phase
            index, resume = index - 1, True
            continue
        is_over = options.steps is not None and options.steps <= _newest_position(out)[0]
        if code or not launched or is_over or options.profile or options.debug or index + 1 == len(phases):
            return code, launched
        index += 1


def _newest_position(out: Path) -> tuple[int, int]:
    """Return the step of the newest checkpoint of a run, and the tokens trained on; zeros if there is none. The ranks
    verify its shards."""
    try:
        newest = find_manifest(out).manifest
    except CheckpointError:
        return 0, 0
    return newest.step, trained_tokens(newest.meta) or 0


def _compile_phase(options: Training, chosen: ChosenSpec) -> tuple[int, str]:
    """Compile a phase if its build is stale. Returns the exit code of the compiler, and the digest of the build."""
    build = Path("build") / chosen.spec.name
    digest = fresh(build, chosen.spec)
    return run_compiler(_compiler(options, chosen, build), output=options.output) if digest is None else (0, digest)


def _finish(options: Training, out: Path, code: int) -> None:
    """Print the run folder. After exit code 0, write the report first; if that fails, the run has still succeeded.

    After a failure no report is written, so that a restart loop or an engineer gets the exit code at once.
    """
    if code == 0 and os.environ.get("RANK", "0") == "0":  # under torchrun, only one rank writes the report
        options.output.tell(_report(options, out))
    elif code:
        options.output.tell(f"report: dsc report {shlex.quote(str(out))}")
    options.output.tell(f"run: {out}")


def _report(options: Training, out: Path) -> str:
    """Write the report, and return the line that names it. If that fails, the reason is printed to standard error."""
    try:
        # imported here, because importing them earlier would delay the start of the ranks
        from compiler.tools.report.run_page import write_run_report
        from compiler.tools.report.summary import summary_of

        path, report = write_run_report(out)
        if summary := summary_of(report):
            options.output.tell("\n".join(map(printable, summary.lines())))
        if options.profile is not None:
            _say_profile(options.output, out)
    except (Exception, KeyboardInterrupt) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        options.output.warn(f"the report could not be written: {printable(reason)}")
        return f"report: dsc report {shlex.quote(str(out))}"
    return f"report: {path}"


def _train(options: Training, chosen: ChosenSpec, build: Path, launcher: Sequence[str]) -> tuple[int, bool]:
    """Compile a stale build, and start the launcher. Returns the exit code, and whether ranks were launched.

    Another process may compile another spec into the same folder. If the launcher then finds another build than the
    expected one, this is repeated silently; traced segments and data are cached by then.
    """
    compiler = _compiler(options, chosen, build)
    for attempt in range(TRIES):
        digest = fresh(build, chosen.spec)
        if digest is None and attempt == 0 and not options.debug and _can_begin(build):  # a debugger needs stdin
            code, launched = call_both(compiler, [*launcher, "--unbuilt"], _request(chosen.spec), output=options.output)
            if not launched:
                return code, False
        else:
            if digest is None:
                code, digest = run_compiler(compiler, output=options.output, quiet=attempt > 0)
                if code:
                    return code, False
            code = call([*launcher, "--compiled", digest], output=options.output)
        if code != EXIT_REPLACED:
            return code, True
    options.output.warn(
        f"error: other processes keep compiling into {build}: give this run another name, or compile it with -o"
    )
    return EXIT_USAGE, False


def _say_profile(output: OutputLines, run: Path) -> None:
    from compiler.tools.picture.formats import screen_of  # imported here, as only a profile needs them
    from compiler.tools.report.profile import write_run_profile
    from compiler.tools.report.profile_text import text

    output.tell(text(write_run_profile(run), screen_of(sys.stdout)) + f"profile: {run / 'profile.json'}")


def _cluster(build: Path) -> Cluster | None:
    """Return the cluster of a build; None if it cannot be read, which the launcher of the ranks will report."""
    try:
        text, path = read(build, edited=True).files[RESOLVED].decode(), os.path.realpath(build / RESOLVED)
        (view,) = analyse(path, reader=reader_of_texts({path: text})).views
    except (BuildError, LookupError, ValueError, SpecError):
        return None
    return view.spec.cluster if view.spec else None


def _one_machine(cluster: Cluster, build: Path, out: Path) -> str:
    """Return a note if the spec has several nodes but all ranks start on this machine, else ""."""
    nodes = sum(count for count, _ in cluster.parts)
    if nodes == 1 or "RANK" in os.environ:
        return ""
    counts = {machine.devices for _, machine in cluster.parts}
    devices = str(counts.pop()) if len(counts) == 1 else "DEVICES"
    train, run = shlex.quote(str(build / "train.py")), shlex.quote(str(out))
    return (
        f"cluster {cluster.name} has {nodes:,} nodes, but dsc train starts all ranks on this machine; to start them on"
        f" {nodes:,} nodes: dsc compile, then on each"
        f" torchrun --nnodes {nodes} --nproc-per-node {devices} … {train} --out {run} (docs/torchrun.md)"
    )


def _name(build: Path) -> str:
    """Return the run name of a build; the folder's name if the build cannot be read, which the launcher will report."""
    try:
        return RunPlan.from_json(read(build, edited=True).files["plan.json"]).run
    except (BuildError, FormError, KeyError):
        return build.resolve().name


def fresh(build: Path, spec: Spec) -> str | None:
    """Return the digest of the build in a folder; None if there is none, or if another spec or other versions of
    software made it. The launcher checks whether the build is complete."""
    try:
        built = read(build, edited=True)
    except BuildError:
        return None
    expected = {RESOLVED: canonical(standing_alone(spec)), **texts_of_files(spec)}
    is_current = all(built.files.get(name) == text.encode() for name, text in expected.items())
    return built.digest if is_current and built.versions == versions() else None


def _compiler(options: Training, chosen: ChosenSpec, build: Path) -> list[str]:
    command = ["compiler.cli.main", "compile", chosen.argument, "-o", str(build)]
    command += ["--cache", str(options.cache)] if options.cache is not None else []
    return [*command, *(word for override in options.changes for word in ("-s", override))]


def _data_cache(options: Training, build: Path) -> Path | None:
    """Return the folder in which runs share prepared data: below --cache, or build/.data.

    None for a build outside build/, as nothing is written beside it.
    """
    if options.cache is not None:
        return Path(options.cache) / "data"
    return build.parent / ".data" if build.parent.resolve() == Path("build").resolve() else None


def _request(spec: Spec) -> str:
    """Return one line of JSON, by which the launcher prepares the data before there is a plan."""
    return json.dumps(tree(data_request(spec)))


def _can_begin(build: Path) -> bool:
    """Whether the data can be prepared during compilation. It cannot if the compiler is unable to write the build,
    which it will report, nor on a rank of torchrun, which shares the data with others."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return False
    try:
        check_place(build)
    except OSError:
        return False
    return True

"""Training on this machine: compile what is stale, start the ranks, and write the report when they have ended.

`dsc train` and `dsc_trainer.train` call it. This process imports no torch: it starts the compiler, and the launcher of
the ranks, which prepares the data meanwhile.
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

from compiler.emit.folder import check_place
from compiler.emit.recipe import data_request
from compiler.plan.spec_files import standing_alone, texts_of_files
from compiler.tools.processes import OWN_STREAMS, OutputLines, call, call_both, compiled
from dsl.canonical import canonical
from dsl.load import analyse
from dsl.messages.diagnostics import SpecError
from dsl.resolve.files import over
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
    from compiler.predict.choose import Chosen

RESOLVED = "spec.resolved"
TRIES = 20  # to compile and to start, where others compile into the same folder


@dataclass(frozen=True)
class Training:
    """What is asked for beyond the spec or build, as the options of `dsc train` say it (runtime/contract/options.py).

    out: the run folder, by default runs/RUN. data: the folder that the data's paths are relative to. changes: of the
    spec, as `-s` takes them. cache: a folder of traced segments and prepared data that builds share.
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
    """The exit code of `dsc train` (runtime/system/outcome.py), and the run folder, which is there unless nothing was
    launched."""

    code: int
    run: Path


def train_build(asked: Training, build: Path) -> TrainingEnd:
    """Train the build of a folder."""
    out = _out(asked, _name(build))
    cluster = _cluster(build)
    if cluster is not None and (said := _one_machine(cluster, build, out)):
        asked.output.tell(said)
    code = call(_launcher(asked, build, out, asked.data or Path.cwd(), resume=asked.resume), output=asked.output)
    return _ended(asked, out, code)


def train_phases(asked: Training, phases: Sequence[Chosen]) -> TrainingEnd:
    """Train a run, phase after phase; most runs have one."""
    out = _out(asked, phases[0].spec.name)
    code, launched = _train_phases(asked, phases, out)
    return _ended(asked, out, code) if launched else TrainingEnd(code, out)


def _ended(asked: Training, out: Path, code: int) -> TrainingEnd:
    """Say where the run is, unless nobody's report wants the numbers: those of a debug run."""
    if not asked.debug and (out / "metrics.jsonl").is_file() and code not in (EXIT_USAGE, EXIT_RETRY):
        _finish(asked, out, code)
    return TrainingEnd(code, out)


def _out(asked: Training, name: str) -> Path:
    """The run folder: all phases of a run have one."""
    return asked.out or Path("runs") / (run_name(name) + DEBUG_SUFFIX * asked.debug)


def _launcher(asked: Training, build: Path, out: Path, data: Path, *, resume: bool) -> list[str]:
    """The command that starts the ranks of a build."""
    launcher = ["runtime.run.train", str(build), "--out", str(out), "--data", str(data)]
    launcher += ["--device", asked.device, "--transport", asked.transport]
    launcher += ["--hang-timeout", str(asked.hang_timeout or "none")]
    launcher += ["--start-timeout", str(asked.start_timeout or "none")]
    launcher += ["--steps", str(asked.steps)] if asked.steps is not None else []
    launcher += ["--resume"] if resume else []
    launcher += ["--skip-batch"] if asked.skip_batch else []
    launcher += ["--restarts", str(asked.restarts)] if asked.restarts else []
    launcher += ["--elastic"] if asked.elastic else []
    launcher += ["--no-copies"] if asked.no_copies else []
    launcher += ["--profile", str(asked.profile)] if asked.profile is not None else []
    launcher += ["--expect", asked.expect] if asked.expect is not None else []
    launcher += ["--data-cache", str(cache)] if (cache := _data_cache(asked, build)) is not None else []
    return launcher + (["--debug", "--debug-rank", str(asked.debug_rank)] if asked.debug else [])


def _train_phases(asked: Training, phases: Sequence[Chosen], out: Path) -> tuple[int, bool]:
    """Train phase after phase of a run, from the one on that it has come to; the exit code of the last that was
    trained, and whether there may be a run."""
    _, tokens = _reached(out) if asked.resume else (0, 0)
    index = sum(each.spec.train.first_token <= tokens for each in phases[1:])
    resume = asked.resume
    if not (asked.profile or asked.debug):
        for each in phases[index + 1 :]:  # a proof that fails is known now, and not after days
            is_reached = asked.steps is None or asked.steps > each.spec.train.first_step
            code, _ = _compiled(asked, each) if is_reached else (0, "")
            if code:
                return code, False
    while True:
        phase = phases[index]
        build = Path("build") / phase.spec.name
        if said := _one_machine(phase.spec.cluster, build, out):
            asked.output.tell(said)
        launcher = _launcher(asked, build, out, asked.data or phase.path.parent, resume=resume or index > 0)
        code, launched = _train(asked, phase, build, launcher)
        if code == EXIT_EARLIER and index:  # the newest checkpoint is damaged, the one before is not so far
            index, resume = index - 1, True
            continue
        is_over = asked.steps is not None and asked.steps <= _reached(out)[0]
        if code or not launched or is_over or asked.profile or asked.debug or index + 1 == len(phases):
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


def _compiled(asked: Training, chosen: Chosen) -> tuple[int, str]:
    """Compile a phase if its build is stale; the exit code of the compiler, and the digest of the build."""
    build = Path("build") / chosen.spec.name
    digest = fresh(build, chosen.spec)
    return compiled(_compiler(asked, chosen, build), output=asked.output) if digest is None else (0, digest)


def _finish(asked: Training, out: Path, code: int) -> None:
    """Say where the run is. After exit code 0 write its report first; whatever becomes of that, the run has ended well.

    After a failure nothing is waited for: a restart loop, or whoever is on call, wants the exit code.
    """
    if code == 0 and os.environ.get("RANK", "0") == "0":  # under torchrun, one of its ranks
        asked.output.tell(_report(asked, out))
    elif code:
        asked.output.tell(f"report: dsc report {shlex.quote(str(out))}")
    asked.output.tell(f"run: {out}")


def _report(asked: Training, out: Path) -> str:
    """Write the report; the line that names it. A report that cannot be written is said on standard error."""
    try:
        # until now it would only have kept the ranks waiting
        from compiler.tools.report.run_page import write_run_report
        from compiler.tools.report.summary import summary_of

        path, report = write_run_report(out)
        if summary := summary_of(report):
            asked.output.tell("\n".join(map(printable, summary.lines())))
        if asked.profile is not None:
            _say_profile(asked.output, out)
    except (Exception, KeyboardInterrupt) as error:
        plain = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            plain = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        asked.output.warn(f"the report could not be written: {printable(plain)}")
        return f"report: dsc report {shlex.quote(str(out))}"
    return f"report: {path}"


def _train(asked: Training, chosen: Chosen, build: Path, launcher: Sequence[str]) -> tuple[int, bool]:
    """Compile what is stale, and start the launcher; the exit code, and whether there may be a run.

    Others may compile another spec into the same folder: where its build is not the one that was compiled or found
    fresh here, all this is done again, and nobody is told, for segments and data are there by then.
    """
    compiler = _compiler(asked, chosen, build)
    for attempt in range(TRIES):
        digest = fresh(build, chosen.spec)
        if digest is None and attempt == 0 and not asked.debug and _can_begin(build):  # a debugger needs stdin
            code, launched = call_both(compiler, [*launcher, "--unbuilt"], _request(chosen.spec), output=asked.output)
            if not launched:
                return code, False
        else:
            if digest is None:
                code, digest = compiled(compiler, output=asked.output, quiet=attempt > 0)
                if code:
                    return code, False
            code = call([*launcher, "--compiled", digest], output=asked.output)
        if code != EXIT_REPLACED:
            return code, True
    asked.output.warn(
        f"error: others compile into {build} again and again: give this run another name, or compile it with -o"
    )
    return EXIT_USAGE, False


def _say_profile(output: OutputLines, run: Path) -> None:
    from compiler.tools.picture.formats import screen_of  # only a profile waits for these
    from compiler.tools.report.profile import write_run_profile
    from compiler.tools.report.profile_text import text

    output.tell(text(write_run_profile(run), screen_of(sys.stdout)) + f"profile: {run / 'profile.json'}")


def _cluster(build: Path) -> Cluster | None:
    """The cluster that a build is for; None where that cannot be read: the ranks' launcher will say what is wrong."""
    try:
        text, path = read(build, edited=True).files[RESOLVED].decode(), os.path.realpath(build / RESOLVED)
        (view,) = analyse(path, reader=over({path: text})).views
    except (BuildError, LookupError, ValueError, SpecError):
        return None
    return view.spec.cluster if view.spec else None


def _one_machine(cluster: Cluster, build: Path, out: Path) -> str:
    """A note for specs of several nodes whose ranks all start on this machine, or ""."""
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
        return RunPlan.from_json(read(build, edited=True).files["plan.json"]).run
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


def _compiler(asked: Training, chosen: Chosen, build: Path) -> list[str]:
    command = ["compiler.cli.main", "compile", chosen.argument, "-o", str(build)]
    command += ["--cache", str(asked.cache)] if asked.cache is not None else []
    return [*command, *(word for override in asked.changes for word in ("-s", override))]


def _data_cache(asked: Training, build: Path) -> Path | None:
    """Where runs share prepared data: below --cache, or beside the builds that `dsc train` makes, in build/.data.

    None for a build that is elsewhere: nothing is written beside that.
    """
    if asked.cache is not None:
        return Path(asked.cache) / "data"
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

"""`dsc sweep [SPEC[:RUN]] -s KEY=A,B… [--plan] [--launch …] [--out FOLDER]`: train every combination of values.

dsc sweep spec.dsc -s train.batch=16,32 -s train.seed=1,2,3      six runs in turn, and a page that compares them
dsc sweep spec.dsc -s 'train.rate=constant at 1e-3 | constant at 3e-3'    separate values that have commas by `|`
dsc sweep spec.dsc -s parallel.pipeline=4,8 --plan               predict each variant; train nothing
dsc sweep spec.dsc -s train.seed=1,2 --train '--device cuda --restarts 3'
dsc sweep spec.dsc -s train.seed=1,2 --launch 'slurm --time 24:00:00'    write launch files for each

All variants are planned before the first one is trained. A variant that does not fit its devices is reported and left
out. If one breaks another rule, nothing is trained, unless --legal leaves it out too. The folder sweeps/<run> has a run
folder for each variant, sweep.json, and in the end compared.html; a table of the trained runs is printed. A stopped
sweep continues with the same command: finished runs are not trained again.

Exit codes: 0 all are trained, planned or written · 1 some failed, or do not fit · 2 the spec or the command line is
wrong · 128 + signal when asked to stop
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import (
    EXIT_DIFFERS,
    EXIT_SPEC,
    add_spec_arguments,
    is_refused,
    phases_of,
    progress,
    reason,
    report_error,
    report_mistakes,
    say,
)
from compiler.cli.commands.output_files import replace
from compiler.cli.commands.sweep_variants import SweepError, Variant, variants
from dsl.messages.diagnostics import Diagnostic, SpecError
from dsl.resolve.chosen import find
from dsl.resolve.files import RESOLVED, content_of
from runtime.contract.options import run_name
from runtime.system.outcome import printable
from runtime.system.streams import open_streams, tell

VERSION = 1  # of the JSON, docs/json.md
TOO_LARGE = "E0812"  # the error code of a plan that cannot fit its devices
STOPPED = 128  # exit codes above: stopped by a signal, which stops the sweep too
TABLE, PAGE = "sweep.json", "compared.html"
OF_THE_SWEEP = (
    "--out",
    "--resume",
    "--skip-batch",
    "--debug",
    "--profile",
    "--expect",
)  # options of dsc train that the sweep sets itself or excludes


@dataclass
class PlannedVariant:
    """A variant with its prediction (None if it cannot be planned) and the exit code of its run."""

    variant: Variant
    folder: Path
    text: str = ""  # the spec.resolved of its run
    parameters: int | None = None
    step_s: float | None = None
    whole_s: float | None = None
    free_bytes: int | None = None  # on the fullest device; negative if it does not fit
    usd: float | None = None
    exit_code: int | None = None

    @property
    def fits(self) -> bool:
        return self.free_bytes is not None and self.free_bytes >= 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="folder for the runs; default: sweeps/<run>")
    parser.add_argument("--plan", action="store_true", help="print the plan of each variant, and run nothing")
    parser.add_argument("--legal", action="store_true", help="leave out variants that break a rule instead of stopping")
    parser.add_argument("--train", metavar="OPTIONS", default="", help="options for dsc train, as one argument")
    parser.add_argument(
        "--launch",
        metavar="LAUNCHER",
        help="write the files that start each variant on a cluster, and run nothing: a launcher and options for"
        " dsc launch, as one argument",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="format of the plans; default: text")


def run(args: argparse.Namespace) -> int:
    """Plan all variants, then train them in turn, or write their launch files. Returns the exit code."""
    open_streams()
    try:
        args.spec = str(find()) if args.spec is None else args.spec
    except SpecError as error:
        report_mistakes(error.diagnostics, args.format)
        return EXIT_SPEC
    try:
        all_variants = variants(args.set)
        options = _options(args)
    except SweepError as error:
        return report_error(str(error), error.hint, args.format)
    planned = _plan(args, all_variants)
    if planned is None:
        return EXIT_SPEC
    top = planned[0].folder.parent
    fitting = [trial for trial in planned if trial.fits]
    if args.format == "json" and args.plan:
        print(json.dumps(document(args.spec, planned), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        tell(_table(planned))
    for trial in planned:
        if not trial.fits and trial.free_bytes is not None:
            say(f"warning: {trial.variant.name} does not fit: dsc plan {_command(args.spec, trial.variant)} says why")
    if args.plan:
        return 0 if len(fitting) == len(planned) else EXIT_DIFFERS
    try:
        top.mkdir(parents=True, exist_ok=True)
        _record(top, args.spec, planned)
        code = (
            _launch_all(args, fitting, options) if args.launch is not None else _train_all(args, top, planned, options)
        )
    except OSError as error:
        return report_error(f"{top} cannot be written: {reason(error)}", "name another folder with --out", args.format)
    return code or (0 if len(fitting) == len(planned) else EXIT_DIFFERS)


def _options(args: argparse.Namespace) -> list[str]:
    """The words of --train or --launch, checked. Raises SweepError if they are not valid for every run."""
    if args.launch is not None and args.train:
        raise SweepError("--train has no effect with --launch, which trains nothing here", "leave one of the two out")
    from compiler.cli.commands.launch import check_options

    words = _words(args.launch if args.launch is not None else args.train)
    if args.launch is None:
        if refused_words := [word for word in words if word.partition("=")[0] in OF_THE_SWEEP]:
            word = refused_words[0]
            raise SweepError(f"{word} cannot be given to the runs of a sweep", f"leave {word} out")
        args.parsers()["train"].parse_intermixed_args([args.spec, *words])
    elif any(word.partition("=")[0] in ("--out", "--run-folder", "--format") for word in words):
        raise SweepError("a sweep sets the folders and the format of --launch", "leave them out, and use --out")
    elif not words:
        raise SweepError("--launch names no launcher", "write --launch 'slurm --time 24:00:00'")
    elif check_options(args.parsers()["launch"].parse_intermixed_args([words[0], "BUILD", *words[1:]])):
        raise SweepError("--launch is wrong", "see above, and dsc launch --help")
    return words


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SweepError(f"{text!r} cannot be read as options: {error}", "close its quotes") from None


# ---------------------------------------------------------------- plans


def _plan(args: argparse.Namespace, all_variants: Sequence[Variant]) -> list[PlannedVariant] | None:
    """Plan each variant. Returns None after printing the mistakes of all."""
    from compiler.cli.commands.plan import plan_of
    from compiler.plan.spec_files import standing_alone
    from dsl.canonical import canonical

    planned, mistakes, tell_progress = list[PlannedVariant](), 0, progress("sweep")
    printed, top = list[Diagnostic](), args.out
    for number, variant in enumerate(all_variants, 1):
        tell_progress(f"plan {number} of {len(all_variants)}: {variant.name}")
        try:
            phases = phases_of(args.spec, list(variant.overrides))
        except SpecError as error:
            if new := [
                diagnostic for diagnostic in error.diagnostics if diagnostic not in printed
            ]:  # variants share mistakes of the spec
                report_mistakes(new)
            printed += new
            is_size = {diagnostic.code for diagnostic in error.diagnostics} == {TOO_LARGE}
            mistakes += not is_size
            planned.append(PlannedVariant(variant, Path(variant.name)))
            continue
        if any([is_refused(phase) for phase in phases]):
            mistakes += 1
            planned.append(PlannedVariant(variant, Path(variant.name)))
            continue
        top = top or Path("sweeps") / run_name(phases[0].spec.name)
        predictions = [plan_of(phase)[1] for phase in phases]
        ranks = [rank for prediction in predictions for rank in prediction.ranks]
        costs = [prediction.money.usd for prediction in predictions]
        planned.append(
            PlannedVariant(
                variant,
                Path(variant.name),
                text=canonical(standing_alone(phases[0].spec)),
                parameters=predictions[0].parameters,
                step_s=max(prediction.step.seconds for prediction in predictions),
                whole_s=sum(prediction.whole_run.seconds for prediction in predictions),
                free_bytes=min(rank.free_bytes for rank in ranks),
                usd=None if None in costs else sum(cost for cost in costs if cost is not None),
            )
        )
    tell_progress("")
    if top is None or (mistakes and not args.legal):
        hint = "see above, and correct -s" if top is None else "see above; correct -s, or leave them out with --legal"
        report_error(
            f"{mistakes or len(all_variants)} of {len(all_variants)} variants cannot be trained", hint, args.format
        )
        return None
    for trial in planned:
        trial.folder = top / trial.folder
    return planned


def _table(planned: Sequence[PlannedVariant]) -> str:
    """The plans as a table, and the total time of all runs."""
    from compiler.cli.commands.compare import align_columns
    from compiler.predict.prediction import count, seconds, size, span

    rows = []
    for trial in planned:
        if trial.free_bytes is None:
            rows.append([trial.variant.name, "", "", "", "refused, see above", ""])
            continue
        free = trial.free_bytes
        memory = f"fits, {size(free)} free" if trial.fits else f"{size(-free)} too much"
        cost = "" if trial.usd is None else f"${count(trial.usd)}"
        times = seconds(trial.step_s or 0), span(trial.whole_s or 0)
        rows.append([trial.variant.name, count(trial.parameters or 0), *times, memory, cost])
    heads = ["run", "parameters", "step", "whole run", "memory", "cost" if any(row[-1] for row in rows) else ""]
    total_s = sum(trial.whole_s or 0 for trial in planned if trial.fits)
    num_fitting = sum(trial.fits for trial in planned)
    fit = "run that fits" if num_fitting == 1 else "runs that fit"
    return f"{align_columns(heads, rows)}\n\n{num_fitting} {fit}, {span(total_s)} one after the other"


def document(spec: str, planned: Sequence[PlannedVariant]) -> dict[str, Any]:
    """The document that docs/json.md describes."""
    return {
        "version": VERSION,
        "spec": spec,
        "runs": [
            {
                "name": trial.variant.name,
                "folder": str(trial.folder),
                "overrides": list(trial.variant.overrides),
                "parameters": trial.parameters,
                "step_s": trial.step_s,
                "whole_s": trial.whole_s,
                "free_bytes": trial.free_bytes,
                "fits": trial.fits,
                "usd": trial.usd,
                "exit_code": trial.exit_code,
            }
            for trial in planned
        ],
    }


def _record(top: Path, spec: str, planned: Sequence[PlannedVariant]) -> None:
    replace(top / TABLE, (json.dumps(document(spec, planned), indent=2, ensure_ascii=False) + "\n").encode())


def _command(spec: str, variant: Variant) -> str:
    return shlex.join([spec, *(word for override in variant.overrides for word in ("-s", override))])


# ---------------------------------------------------------------- runs


def _train_all(args: argparse.Namespace, top: Path, planned: Sequence[PlannedVariant], options: Sequence[str]) -> int:
    """Train the variants that fit in turn, continuing after failures. Returns the exit code."""
    from compiler.tools.processes import call

    fitting, worst = [trial for trial in planned if trial.fits], 0
    for number, trial in enumerate(fitting, 1):
        title = f"sweep: {number} of {len(fitting)}, {trial.variant.name}"
        if _has_finished(trial):
            trial.exit_code = 0
            tell(f"{title}: has finished")
            continue
        tell(title)
        words = ["compiler.cli.main", "train", args.spec, "--out", str(trial.folder), *options]
        words += ["--resume"] if os.path.lexists(trial.folder) else []
        trial.exit_code = call([*words, *(word for override in trial.variant.overrides for word in ("-s", override))])
        _record(top, args.spec, planned)
        if trial.exit_code > STOPPED:
            tell(f"sweep: stopped; run the same command to continue: {top}")
            return trial.exit_code
        if trial.exit_code:
            worst = EXIT_DIFFERS
            say(f"warning: {trial.variant.name} failed with exit code {trial.exit_code}; the sweep continues")
    _record(top, args.spec, planned)
    _compare(top, [trial for trial in fitting if trial.exit_code == 0])
    return worst


def _has_finished(variant: PlannedVariant) -> bool:
    """Whether the folder has a finished run of exactly this spec."""
    from compiler.tools.report.run_page import events_of

    ends = [event for event in events_of(variant.folder) if event.get("event") in ("start", "end")]
    if not ends or ends[-1].get("outcome") != "finished":
        return False
    return content_of(str(variant.folder / RESOLVED)).content == variant.text.encode()


def _compare(top: Path, finished: Sequence[PlannedVariant]) -> None:
    """Print a table of the finished runs, and write a page of it, if there are at least two."""
    from compiler.cli.commands.compare import table
    from compiler.tools.report.compared import compare, compare_html, read_run

    if len(finished) < 2:
        return
    page = top / PAGE
    try:
        compared = compare([read_run(trial.folder, trial.variant.label) for trial in finished])
        tell(f"\n{table(compared)}\n")
        replace(page, compare_html(compared, f"Sweep {top.name}").encode())
        tell(f"compared: {page}")
    except (OSError, ValueError) as error:
        say(f"warning: {page} was not written: {printable(reason(error))}")


def _launch_all(args: argparse.Namespace, fitting: Sequence[PlannedVariant], options: Sequence[str]) -> int:
    """Compile each variant and write its launch files into its folder. Prints the commands that start them."""
    from compiler.tools.processes import run_compiler

    commands = []
    for number, trial in enumerate(fitting, 1):
        tell(f"sweep: {number} of {len(fitting)}, {trial.variant.name}")
        build = trial.folder / "build"
        words = ["compiler.cli.main", "compile", args.spec, "-o", str(build)]
        code, _ = run_compiler(
            [*words, *(word for override in trial.variant.overrides for word in ("-s", override))], quiet=True
        )
        if code:
            return code
        folders = ["--out", str(trial.folder / "launch"), "--run-folder", str((trial.folder / "run").absolute())]
        parser, output = args.parsers()["launch"], StringIO()
        with redirect_stdout(output):
            launch = parser.parse_intermixed_args([options[0], str(build), *options[1:], *folders, "--format", "json"])
            code = launch.run(launch)
        if code:
            return int(code)
        commands += json.loads(output.getvalue())["commands"]
    print("\n".join(printable(command) for command in commands), file=sys.stdout)
    return 0

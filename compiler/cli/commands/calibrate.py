"""`dsc calibrate [SPEC[:RUN]] -o rates.json`: measure the rates of this machine that plans use.

dsc calibrate -o rates.json                          at the shapes of a small model; takes about half a minute
dsc calibrate train.dsc -o rates.json                at the shapes of the spec; then: cluster { rates = "rates.json" }
dsc calibrate train.dsc --trace t.json -o rates.json  class factors from one traced layer; measures nothing

Exit codes: 0 done · 2 the spec, the trace or the command line is wrong · others: exit codes of the measuring processes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compiler.cli.commands.common import EXIT_SPEC, add_spec_arguments, load_spec, report_error, say
from compiler.cli.commands.output_files import refuse_output, write
from compiler.ir import Plan
from compiler.machine.rates import RateError, RateTable, read_table, shipped_table, shipped_table_names
from compiler.machine.rates.calibration import job, table_of, tasks_of
from compiler.machine.rates.table import MeasuredDevice
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rates_of, table_for
from compiler.predict.choose import ChosenSpec
from compiler.tools.templates import SHIPPED
from dsl.canonical import quote
from dsl.messages.diagnostics import plural
from dsl.resolve.files import collect
from dsl.schema import Spec

BUDGET_S = 20.0  # for the ops; transfers take a few more seconds
MEASURED_ON = "quickstart.dsc"  # without a spec
FAR = "../../"  # paths that leave the spec's folder by more than one level are printed absolute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser, f"a spec file, or SPEC:RUN; default: the {MEASURED_ON} that comes with dsc")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="the rate table to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="a trace of one layer of the spec (docs/rates.md)")
    parser.add_argument(
        "--table",
        metavar="TABLE",
        help="with --trace: the rate table to correct, a file or a name; default: the device's",
    )


def run(args: argparse.Namespace) -> int:
    """Measure the rates, or derive them from a trace, and write the table."""
    if args.table and not args.trace:
        return report_error("--table needs --trace", "without a trace, everything is measured")
    default = next(folder / MEASURED_ON for folder in SHIPPED if (folder / MEASURED_ON).exists())
    try:
        refuse_output(args.out, args.spec, args.trace, args.table)  # before the work
    except OSError as error:
        return _report_write_error(args.out, error)
    chosen = load_spec(args.spec or str(default), args.set)
    if chosen is None:
        return EXIT_SPEC
    plan = make_plan(chosen.spec)
    try:
        result = (
            _scale_by_trace(args, chosen.spec, plan) if args.trace else _measure_machine(args.device, chosen.spec, plan)
        )
    except RateError as error:
        return report_error(str(error))
    if isinstance(result, int):
        return result
    try:
        write(args.out, result.to_json().encode())
    except OSError as error:
        return _report_write_error(args.out, error)
    print(f"{args.out}: {plural(len(result.rows), 'row')}, {plural(len(result.factors), 'class factor')}")
    print(f"plan with it:  {_edit(chosen, args)}")
    return 0


def _report_write_error(path: Path, error: OSError) -> int:
    return report_error(f"{path} cannot be written: {error.strerror}")


def _edit(chosen: ChosenSpec, args: argparse.Namespace) -> str:
    """The line of a spec that names the table. Its path is relative to the file with the cluster block.

    The path is absolute if it leaves that folder by more than one level, or if no spec was named.
    """
    real_path, name = os.path.realpath(args.out), chosen.spec.cluster.name
    if not args.spec:
        return f"cluster … {{ rates = {quote(real_path)} }}"
    file = collect(str(chosen.path)).blocks["cluster", name].head.source.name
    relative = os.path.relpath(real_path, Path(file).resolve().parent)
    path = real_path if relative.startswith(FAR) else relative
    place = f"  in {file}" if file != os.path.normpath(chosen.path) else ""
    return f"cluster {name} {{ rates = {quote(path)} }}{place}"


def _scale_by_trace(args: argparse.Namespace, spec: Spec, plan: Plan) -> RateTable:
    from compiler.predict.traced_layer import calibrate_table, read_trace, uncalibrated_classes

    name = args.table or table_for(spec.cluster.node.device)
    table = shipped_table(name) if name in shipped_table_names() else read_table(Path(name))
    trace = read_trace(args.trace)
    scaled = calibrate_table(table, trace, spec, plan, plan.cuts)
    if names := uncalibrated_classes(scaled, spec, plan, plan.cuts):
        say(
            f"note: {', '.join(names)}: not in the trace, or not run by its layer {trace.layer}; the factors of table "
            f"{table.name[:40]} are kept"
        )
    return scaled


def _measure_machine(device: str, spec: Spec, plan: Plan) -> RateTable | int:
    """The table of this machine, or the exit code of the measuring process if it fails."""
    from compiler.plan.split_blocks import balanced_rows

    tasks, skipped = tasks_of(plan, rates_of(spec, "cpu"), balanced_rows(spec))
    if skipped:
        say(f"calibrate: skipped as too large to measure here: {plural(skipped, 'op')}")
    if not tasks:
        raise RateError("every op of this spec is too large to measure here: use a smaller model")
    cores = len(os.sched_getaffinity(0))
    processes = min(cores, spec.cluster.node.devices) if device == "cpu" else 1
    with tempfile.TemporaryDirectory(prefix="dsc-calibrate-", ignore_cleanup_errors=True) as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "measured.json")
        transfers = 2 if device == "cpu" else 0
        job_file.write_text(json.dumps(job(tasks, device, processes, transfers, BUDGET_S)), "utf-8")
        command = [sys.executable, "-P", "-m", "runtime.observe.calibrate", str(job_file), str(result_file)]
        code = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
        if code:
            return code if code > 0 else 128 - code
        measured = json.loads(result_file.read_text("utf-8"))
    name = measured["device"] if device == "cuda" else _processor()
    measured_on = MeasuredDevice(name=name, cores=cores if device == "cpu" else None)
    return table_of(measured, tasks, measured_on, f"measured on {name}, {cores} cores", time.strftime("%Y-%m-%d"))


def _processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """The model name of this machine's processor."""
    try:
        lines = info.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name[:200] for name in names if name), platform.machine() or "CPU")

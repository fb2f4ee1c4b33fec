"""`dsc plan [SPEC[:RUN]] [-s key=value] [--rates FILE] [--format …]`: predict a run's time, cost and memory.

dsc plan                                     the spec in the current folder
dsc plan specs/deepseek-v3.dsc               time, cost and memory on 2,048 devices, in a second on a laptop
dsc plan spec.dsc -s parallel.pipeline=8     with another plan
dsc plan spec.dsc --rates here.json          with the rates that dsc calibrate measured
dsc plan spec.dsc --what-if                  the cost of uneven loads of experts, and the next changes to try
dsc plan spec.dsc --budget 60s               ends the search for the values of auto after a minute
dsc plan spec.dsc --format json              for programs (docs/json.md)
dsc plan spec.dsc --format html -o plan.html pictures of placement, memory over time, network and schedule

For a run with phases, each phase is planned and the totals are added up; SPEC:RUN.2 plans only the second phase.

A spec that cannot be trained yet can be planned too. If a plan does not fit, edits that make it fit are planned, and
the fastest are shown. The assumptions are listed at the end.

Ctrl-C ends the search for the values of `auto`: the best plan so far is printed, if one fits.

Exit codes: 0 planned, whether or not it fits: programs read `memory.fits` of the JSON · 2 the spec or the command line
is wrong · 130 interrupted, also if the best plan so far was printed
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.cli.commands.common import (
    EXIT_SPEC,
    add_budget,
    add_spec_arguments,
    load_phases,
    progress,
    report_error,
    say,
)
from compiler.cli.commands.output_files import refuse_output, write_or_print
from compiler.predict.choose import ChosenSpec, Patience
from compiler.predict.prediction import OrderGain
from compiler.program.lower import Lowering
from compiler.schedule.schedule import Schedule
from compiler.tools.picture.drawing import Screen
from compiler.tools.picture.formats import screen_of
from dsl.schema import Spec

if TYPE_CHECKING:
    from compiler.machine.rates import RateTable
    from compiler.predict.prediction import Prediction, RankMemory, WhatIf
    from compiler.predict.timed_plan import TimedPlan
    from compiler.predict.why_shown import Misfit
    from runtime.data.samples import AnySamples


# --- The prepared text of a run, with which `dsc plan` computes the gain of `order = cost`


def order_gain(spec: Spec, lowering: Lowering, schedule: Schedule, folder: Path, cache: Path) -> OrderGain | None:
    """The gain of `order = cost` on the prepared data in a cache. None without that key, without prepared data, or with
    several sources. `folder`: base of the data's relative paths."""
    if spec.schedule.order != "cost" or not cache.is_dir():
        return None
    text = _prepared_folder(spec, folder, cache)
    if text is None:
        return None
    from compiler.predict.micro_batch_order import gain_on
    from runtime.data.files import DataError

    try:
        return gain_on(samples_in(spec, text), spec, lowering, schedule, str(text))
    except DataError:  # the text is too short: the run will report it
        return None


def samples_in(spec: Spec, text: Path) -> AnySamples:
    """The training samples of a prepared text."""
    from compiler.emit.data_recipe import data_request
    from runtime.contract import EXTRA_TOKENS
    from runtime.data.samples import samples_of

    chat = data_request(spec).data.chat
    return samples_of(text, "train", spec.train.sequence, EXTRA_TOKENS, seed=spec.train.seed, chat=chat)


def _prepared_folder(spec: Spec, folder: Path, cache: Path) -> Path | None:
    """The folder in a cache with the prepared text of a spec, or None if it is missing or has changed."""
    from compiler.emit.data_recipe import data_request
    from runtime.data import store
    from runtime.data.files import DataError
    from runtime.data.prepare import request_entry, task_of

    request = data_request(spec)
    if request.data.sources:
        return None
    requested = request_entry(request)
    metas = (store.meta_of(candidate) for candidate in store.folders(cache))
    if not any(meta is not None and meta.get("request") == requested for meta in metas):
        return None  # decided without reading the text
    try:
        text = cache / task_of(request, folder, lambda *_: None).key
    except (DataError, OSError):  # the run will report it
        return None
    return text if store.verified_meta(text) is not None else None


# --- plan

EXIT_INTERRUPTED = 130  # by Ctrl-C, after the best plan so far was printed
CACHE = Path("build/.data")  # where `dsc train` keeps prepared data


@dataclass(frozen=True)
class PlannedRun:
    """A run, or one phase of it, with its prediction, and why it does not fit (None if it fits)."""

    chosen: ChosenSpec
    timed: TimedPlan
    prediction: Prediction
    why: Misfit | None
    what_if: WhatIf | None  # if it was asked for, of a plan that fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)
    add_budget(parser)
    parser.add_argument("--rates", metavar="FILE", help="a rate table, as a file or a name; default: the spec's")
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="plan uneven loads of experts, and other values of degrees, micro_batch, recompute, zero, overlap_reduce, "
        "the schedule's name, sm.communication and FP8",
    )
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="width of the text; default: the terminal's")
    parser.add_argument(
        "--format",
        choices=("text", "json", "html"),
        default="text",
        help="text, json (docs/json.md) or html (a page with pictures); default: text",
    )
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write to a file, not to stdout")
    parser.set_defaults(at_once=True)  # cli.main exits right after the last line


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns the exit code."""
    try:
        if args.out is not None:
            refuse_output(args.out, args.spec, args.rates)  # before the work
    except OSError as error:
        return _report_write_error(args, error)
    from compiler.machine.rates import RateError

    try:
        table = _table(args.rates) if args.rates is not None else None
    except RateError as error:
        return report_error(str(error), output_format=args.format)
    phases = load_phases(args.spec, args.set, args.format, table, Patience(args.budget, keeps_on_interrupt=True))
    if phases is None:
        return EXIT_SPEC
    if len(phases) > 1 and args.format == "html":
        listed = ", ".join(f"`{phase.argument}`" for phase in phases)
        return report_error("a page shows one phase, and this run has several", f"name one: {listed}")
    if args.what_if and args.format == "html":
        return report_error("a page does not show --what-if", "use --format text or json", output_format="text")
    planned = [_plan_run(args, phase) for phase in phases]
    try:
        write_or_print(RENDERERS[args.format](args, planned), args.out)
    except OSError as error:
        if args.out is None:
            raise
        return _report_write_error(args, error)
    return EXIT_INTERRUPTED if any(phase.ranking and phase.ranking.is_interrupted for phase in phases) else 0


def _plan_run(args: argparse.Namespace, chosen: ChosenSpec) -> PlannedRun:
    """Plan a run, or one phase of it."""
    timed, prediction = plan_of(chosen)
    why = None if prediction.fits else _explain_misfit(args, chosen, timed, prediction.ranks)
    if args.what_if and not prediction.fits:
        say("note: `--what-if` needs a plan that fits")
    what_if = _what_if(args, chosen, timed, prediction.ranks) if args.what_if and prediction.fits else None
    return PlannedRun(chosen, timed, prediction, why, what_if)


def plan_of(chosen: ChosenSpec) -> tuple[TimedPlan, Prediction]:
    """The timed plan of a run, or of one phase of it, and the prediction."""
    from compiler.plan.plan import make_plan
    from compiler.plan.spec_rates import rank_rates
    from compiler.predict.predict import memories, predict_timed_plan, scheduler_of, time_schedule
    from compiler.program.lower import Lowering

    lowering = Lowering(make_plan(chosen.spec), rank_rates(chosen.spec))
    timed = time_schedule(chosen.spec, lowering, scheduler_of(chosen.spec, lowering).largest())
    gain = order_gain(chosen.spec, lowering, timed.schedule, chosen.path.parent, CACHE)
    return timed, replace(predict_timed_plan(timed, memories(timed)), order_gain=gain)


def _report_write_error(args: argparse.Namespace, error: OSError) -> int:
    return report_error(f"{args.out} cannot be written: {error.strerror}", output_format=args.format)


def _explain_misfit(
    args: argparse.Namespace, chosen: ChosenSpec, timed: TimedPlan, ranks: Sequence[RankMemory]
) -> Misfit:
    """Why the plan does not fit, and edits that make it fit."""
    from compiler.predict.memory import gib, overflows
    from compiler.predict.why import fitting_edits
    from compiler.predict.why_shown import misfit_of
    from dsl.load import variants

    choice = chosen.ranking.best.choice if chosen.ranking else {}
    legal = variants(chosen.argument, None, args.set, choice)
    tell = progress("plan")
    fullest = overflows(ranks)[0]
    tell(f"{gib(fullest.over_bytes)} too much on pipeline rank {fullest.pp_rank}: looking for edits that make it fit")
    try:
        edits = fitting_edits(timed, ranks, legal, chosen.origins, tuple(choice))
    finally:
        tell("")
    return misfit_of(timed, ranks, edits, chosen.origins)


def _what_if(args: argparse.Namespace, chosen: ChosenSpec, timed: TimedPlan, ranks: Sequence[RankMemory]) -> WhatIf:
    """The cost of uneven loads of experts, and the next changes of a plan that fits."""
    from compiler.predict.changes import next_changes
    from compiler.predict.imbalance import load_effects
    from compiler.predict.prediction import WhatIf
    from dsl.load import variants

    legal = variants(chosen.argument, None, args.set, chosen.ranking.best.choice if chosen.ranking else {})
    tell = progress("plan")
    try:
        changes = next_changes(
            timed, ranks, legal, chosen.origins, lambda share: tell(f"planning changes: {share:.0%}")
        )
    finally:
        tell("")
    return WhatIf(load_effects(timed), changes)


def _json(args: argparse.Namespace, planned: Sequence[PlannedRun]) -> str:
    from compiler.predict.json import document, document_of_phases
    from compiler.predict.search import document as rows_of

    documents = [
        document(planned_run.prediction, planned_run.why, planned_run.what_if)
        | (
            {"choices": [], "unexamined": 0}
            if (ranking := planned_run.chosen.ranking) is None
            else {"choices": rows_of(ranking), "unexamined": ranking.unexamined}
        )
        for planned_run in planned
    ]
    value = (
        documents[0]
        if len(planned) == 1
        else document_of_phases(documents, [planned_run.prediction for planned_run in planned])
    )
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _html(args: argparse.Namespace, planned: Sequence[PlannedRun]) -> str:
    from compiler.tools.report.plan_page import plan_html  # imports jinja2

    (run,) = planned
    return plan_html(run.timed, run.prediction, run.why)


def _text(args: argparse.Namespace, planned: Sequence[PlannedRun]) -> str:
    from compiler.tools.report.prediction_text import text, text_of_phases  # imports rich

    screen = screen_of(sys.stdout) if args.out is None else Screen()
    screen = replace(screen, width=args.width) if args.width else screen
    parts = [text(run.prediction, screen, run.chosen.ranking, run.why, run.what_if) for run in planned]
    parts += [text_of_phases([planned_run.prediction for planned_run in planned], screen)] if len(planned) > 1 else []
    return "\n".join(parts)


RENDERERS = {"text": _text, "json": _json, "html": _html}


def _table(name: str) -> RateTable:
    """A rate table that comes with dsc, or one in a file. Raises RateError if there is none."""
    from compiler.machine.rates import RateError, read_table, shipped_table, shipped_table_names

    if name in shipped_table_names():
        return shipped_table(name)
    if "/" not in name and not name.endswith(".json") and not Path(name).exists():
        raise RateError(
            f"there is no rate table {name[:80]!r}: use a file, or one of {', '.join(shipped_table_names())}"
        )
    return read_table(Path(name))

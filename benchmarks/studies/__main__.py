"""Studies of training: variants of a small model, each trained from several seeds, and a page with the results.

    make study-balance                              # train runs without results, then write docs/balancing.md
    make study-fp8                                  # the same for docs/fp8.md
    python -m benchmarks.studies balance --page     # only write the page, from the stored results
    python -m benchmarks.studies fp8 --again mxfp8  # train a variant again, after a change in its code

Results are in benchmarks/results, one file per study. A run with a result is trained again only if its spec has
changed; a stopped run continues from its last checkpoint. Exit codes: 0 complete · 1 a run failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.studies.records import read_results, results_path, write_results
from benchmarks.studies.study import ROOT
from benchmarks.studies.training import Trainings

STUDIES = ("balance", "fp8")
SIDE_BY_SIDE = 2  # runs, each of one thread


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies", description=__doc__.split("\n", 1)[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--only", action="append", default=[], metavar="VARIANT", help="train only these variants")
    parser.add_argument("--again", action="append", default=[], metavar="VARIANT", help="discard a variant's results")
    parser.add_argument("--jobs", type=int, default=SIDE_BY_SIDE, help=f"concurrent runs; default: {SIDE_BY_SIDE}")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "studies", help="folder for runs in progress")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # an exception, so that runs are stopped, too
    module = import_module(f"benchmarks.studies.{args.study}")
    path = results_path(module.STUDY)
    results = read_results(path, module.STUDY)
    failed: list[str] = []
    if args.again:
        results.runs = {name: run for name, run in results.runs.items() if run.variant not in args.again}
        write_results(path, results)
    if not args.page:
        work = args.work.resolve() / module.STUDY.name
        results, failed = Trainings(module.STUDY, path, work, args.jobs, tuple(args.only)).complete()
    written = module.written(results)
    written.write()
    print(f"wrote {written.page.relative_to(ROOT)} and {written.picture.relative_to(ROOT)}")
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

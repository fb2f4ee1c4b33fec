"""The speed benchmark: dsc, `transformers`, plain PyTorch and torch's pipelining train in turn on this machine.

    make bench                                   # all contests → benchmarks/results/speed → docs/performance.md
    python -m benchmarks.speed --quick           # two rounds of a few contestants, printed
    python -m benchmarks.speed --only "bench-8"  # contests by name, printed
    python -m benchmarks.speed --only precisions --update  # measure a contest again, then write the page
    python -m benchmarks.speed --page            # docs/performance.md from the stored results

The machine should be idle: a contestant with several threads slows down disproportionately if another process is busy.
Exit codes: 0 measured · 1 a contestant failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.speed.arena import Record, compete
from benchmarks.speed.contests import CORES, Contest, builds_of, chosen, contestant
from benchmarks.speed.page import PAGE, ROOT, file_of, page, results, table
from benchmarks.speed.work import Work, work_of
from dsl.load import resolve
from runtime.build.build import Build
from runtime.system.strict_json import tree

ROUNDS, QUICK_ROUNDS = 5, 2
WORK = ROOT / "runs" / "speed"
TOLERANCE = {
    "fp32": 1e-3,
    "bf16": 2e-2,
    "each": 5e-2,
}  # for the losses of the first step, which have the same weights and samples
PACKAGES = ("torch", "transformers", "numpy")


def main() -> int:
    args = _parser().parse_args()
    if not args.page:
        rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
        contests = chosen(args.quick, args.only)
        document = {**about(rounds), "contests": [measured(contest, rounds) for contest in contests]}
        for contest in document["contests"]:
            print(table(contest), flush=True)
        if args.update:
            document = updated(before(document), document)
        elif args.quick or args.only:
            path = args.out or WORK / "results.json"
            write(path, document)
            print(f"wrote {path}")
            return failed(document)
        write(file_of(document["processor"]), document)
    everywhere = results()
    PAGE.write_text(page(everywhere), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return failed(everywhere[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two rounds of a few contestants")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, or {QUICK_ROUNDS} with --quick")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="contests whose names contain WORD")
    parser.add_argument("--update", action="store_true", help="update the stored results with this measurement")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--out", type=Path, help="file for partial results; default: runs/speed/results.json")
    return parser


def before(found: dict[str, Any]) -> dict[str, Any]:
    """The stored results for this kind of processor. Raises SystemExit if there are none."""
    file = file_of(found["processor"])
    if not file.is_file():
        raise SystemExit(f"there are no results of {found['processor']}: measure all contests")
    stored: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return stored


def updated(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The results `before` with those in `found` replaced. Raises SystemExit if they are from another machine."""
    keys = ("processor", "cores", "versions", "rounds")
    if any(before[key] != found[key] for key in keys):
        raise SystemExit("the stored results are from another machine: measure all contests")
    contests = {contest["name"]: contest for contest in (*before["contests"], *found["contests"])}
    return {**before, "contests": list(contests.values())}


def about(rounds: int) -> dict[str, Any]:
    """The machine, the versions and the date."""
    memory = next(line for line in Path("/proc/meminfo").read_text("ascii").splitlines() if line.startswith("MemTotal"))
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": processor(Path("/proc/cpuinfo").read_text("utf-8")),
        "cores": CORES,
        "memory_bytes": int(memory.split()[1]) * 1024,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "rounds": rounds,
    }


def processor(cpuinfo: str) -> str:
    """The name of the processor and its family, which a hypervisor does not hide: "AMD EPYC, family 25"."""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    name = fields.get("model name") or platform.processor()
    return f"{name}, family {fields['cpu family']}" if "cpu family" in fields else name


def measured(contest: Contest, rounds: int) -> dict[str, Any]:
    """Measure a contest: the work of a step, and all rounds of each row."""
    spec = resolve(ROOT / contest.spec).spec
    limited = any(row.group == "limit" for row in contest.rows)
    size = spec.train.batch.end, spec.train.sequence
    work = work_of(spec.model, *size) if limited else Work(math.prod(size), (), 0)
    place = WORK / contest.name.replace(" ", "-")
    builds, refused = compiled(contest, place / "builds")
    corpus = prepared(builds["start"])
    rows = [row for row in contest.rows if row.name not in refused]
    contestants = [contestant(contest, row, builds.get(row.name, builds["start"]), corpus, WORK) for row in rows]
    records = compete(contestants, rounds, place / "logs", lambda text: print(text, file=sys.stderr, flush=True))
    disagree(records, TOLERANCE[contest.precision])
    records |= {name: Record(contest.steps, failed=f"not measured: {why}") for name, why in refused.items()}
    return {
        "name": contest.name,
        "title": contest.title,
        "spec": contest.spec,
        "precision": contest.precision,
        "tokens": work.tokens,
        "product_flops": work.product_flops,
        "attention_flops": work.attention,
        "rows": [
            {
                **{key: getattr(row, key) for key in ("name", "title", "group", "processes", "threads")},
                **_plain(records[row.name]),
            }
            for row in contest.rows
        ],
    }


def disagree(records: dict[str, Record], tolerance: float) -> None:
    """Mark contestants as failed whose first loss differs from the others', because they do other work."""
    first = {name: r.losses[0] for name, r in records.items() if r.losses and r.losses[0] is not None}
    finite = [loss for loss in first.values() if math.isfinite(loss)]
    common = statistics.median(finite) if finite else math.nan
    for name, loss in first.items():
        if not abs(loss - common) <= tolerance:
            records[name].failed = (
                records[name].failed or f"its first loss is {loss:.4f}, that of the others {common:.4f}"
            )


def _plain(record: Record) -> dict[str, Any]:
    """A record with its rounds as [seconds, processor seconds]."""
    rounds = [[round(r.seconds, 6), round(r.processor_s, 6)] for r in record.rounds]
    return {**asdict(record), "rounds": rounds, "idle_processor_s": round(record.idle_processor_s, 6)}


def compiled(contest: Contest, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Compile with `dsc compile`. Returns the builds by row, and the reasons for rows without one."""
    builds: dict[str, Path] = {}
    refused: dict[str, str] = {}
    for name, overrides in builds_of(contest).items():
        build = folder / name.replace(" ", "-")
        options = [word for override in overrides for word in ("-s", override)]
        command = [sys.executable, "-m", "compiler.cli.main", "compile", contest.spec, "-o", str(build), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            refused[name] = (done.stderr.strip() or done.stdout.strip()).splitlines()[0]
        else:
            builds[name] = build
    if "start" in refused:
        raise SystemExit(f"{contest.spec} does not compile: {refused['start']}")
    return builds, refused


def prepared(build: Path) -> Path:
    """The corpus of a build, which is prepared once and then reused."""
    command = [sys.executable, "-m", "runtime.data.__main__", str(ROOT / "specs"), str(WORK / "data")]
    request = json.dumps(tree(Build.open(build).plan.data_request))
    done = subprocess.run(command, cwd=ROOT, input=request, stdout=subprocess.PIPE, text=True, check=True)
    return Path(json.loads(done.stdout)["folder"])


def write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def failed(found: dict[str, Any]) -> int:
    """1 if a contestant failed, else 0. A spec that this version refuses to compile is no failure."""
    rows = [row for contest in found["contests"] for row in contest["rows"]]
    return int(any(row["failed"] and not row["failed"].startswith("not measured") for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""The time of `dsc compile`, cold and with cached segments, its breakdown, and of other commands on specs.

    python -m benchmarks.compile_speed [--rounds 3] [--page]

Writes benchmarks/results/compile-speed.json and docs/compile-speed.md; `--page` writes only the page, from the stored
results. Commands run in turn, so that other work on the machine affects all of them, one thread each.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "compile-speed.json"
PAGE = ROOT / "docs" / "compile-speed.md"
DSC = (sys.executable, "-P", "-m", "compiler.cli.main")
QUICKSTART = (str(ROOT / "specs" / "quickstart.dsc"),)
V3 = (str(ROOT / "specs" / "deepseek-v3.dsc"),)
MANY = ("-s", "cluster.nodes=16384", "-s", "train.batch.from=196608", "-s", "train.batch.to=983040")
SPECS = {
    "DeepSeek-V3, 2,048 devices": V3,
    "DeepSeek-V3, 131,072 devices": (*V3, *MANY),
    "quickstart, 4 CPU ranks": QUICKSTART,
}
SMALL, LARGE, _ = SPECS
WIDE = ("-s", "cluster.nodes=131072", "-s", "train.batch.from=1572864", "-s", "train.batch.to=7864320")
MILLION = (*V3, *WIDE, "-s", "train.rate.0=warmup 100 steps to 2.2e-4")
OPENED = ("parallel.pipeline", "parallel.expert", "train.micro_batch", "recompute")
AUTO = tuple(word for key in OPENED for word in ("-s", f"{key}=auto"))
COMMANDS: dict[str, tuple[tuple[str, ...], float]] = {  # label → words, and the goal in seconds
    "`dsc check`": (("check", *V3), 0.25),
    "`dsc plan`": (("plan", *V3), 1.5),
    "`dsc plan`, 40 GiB: does not fit": (("plan", *V3, "-s", "cluster.node.device.memory=40GiB"), 5.0),
    "`dsc plan`, four keys `auto`": (("plan", *V3, *AUTO), 20.0),
    "`dsc plan`, four keys and the schedule `auto`": (("plan", *V3, *AUTO, "-s", "schedule.name=auto"), 20.0),
    "`dsc plan`, 1,048,576 devices": (("plan", *MILLION), 5.0),
    "`dsc compile`, 1,048,576 devices, traced": (("compile", *MILLION, "-o", "million", "--no-cache"), 20.0),
}
# The parts of a compilation: (label in the table, module, function or method). An outer part excludes the inner ones.
PARTS = (
    ("read and check the spec", "compiler.cli.commands.compile", "load_phases"),
    ("plan", "compiler.pipeline", "make_plan"),
    ("schedules", "compiler.pipeline", "schedule"),
    ("programs", "compiler.pipeline", "Lowering.program"),
    ("proofs", "compiler.pipeline", "Prover.prove"),
    ("segments: traced, or read", "compiler.pipeline", "Segments.code"),
    ("plan.json", "compiler.emit.emission", "plan_json"),
    ("report", "compiler.tools.report.page", "report_of"),
    ("report", "compiler.tools.report.page", "report_html"),
    ("program/*.json", "compiler.emit.emission", "program_json"),
    ("stages/*.py, read back", "compiler.emit.emission", "StageModules.rank_module"),
    ("certificates", "compiler.emit.emission", "Certificates.json"),
    ("write the folder", "compiler.cli.commands.compile", "write_build"),
)
LEAST_S = 0.5  # the page has no row for shorter parts
NUM_SIZES = 49  # batch sizes of DeepSeek-V3; a test compares it
GOALS_S = {"cold": 12.0, "kept": 3.0, "first step": 8.0}
MOST_GROWTH = 1.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("--parts", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parts:
        print(json.dumps(parts_of(args.parts)), file=sys.stderr)
        return 0
    if not args.page:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(measured(args.rounds), indent=1) + "\n", "utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text("utf-8"))), "utf-8")
    return 0


# ---------------------------------------------------------------- measuring


def measured(rounds: int) -> dict[str, Any]:
    """Seconds and bytes of each command in each round."""
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        compiled = {
            name: {
                "cold": [
                    _timed(("compile", *words, "-o", f"{index}-cold", "--no-cache"), folder) for _ in range(rounds)
                ],
                "first": _timed(("compile", *words, "-o", f"{index}"), folder),
                "kept": [_timed(("compile", *words, "-o", f"{index}"), folder) for _ in range(rounds)],
            }
            for index, (name, words) in enumerate(SPECS.items())
        }
        parts = {
            name: {
                "cold": _parts((*words, "-o", f"{index}-cold", "--no-cache"), folder),
                "kept": _parts((*words, "-o", f"{index}"), folder),
            }
            for index, (name, words) in enumerate(SPECS.items())
        }
        commands = {label: [_timed(words, folder) for _ in range(rounds)] for label, (words, _) in COMMANDS.items()}
        steps = [_first_steps(folder / f"train-{n}") for n in range(rounds)]
    cores, python = os.cpu_count(), platform.python_version()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores, Python {python}",
        "torch": metadata.version("torch").partition("+")[0],
        "load": [*loads, os.getloadavg()[0]],
        "rounds": rounds,
        "compiled": compiled,
        "parts": parts,
        "commands": commands,
        "first_step_s": {state: [seconds[state] for seconds in steps] for state in steps[0]},
    }


def _timed(words: tuple[str, ...], folder: Path) -> dict[str, float]:
    """Run one `dsc` command. Returns its wall-clock seconds, CPU seconds and peak memory in bytes."""
    begin = time.perf_counter()
    process = subprocess.Popen((*DSC, *words), cwd=folder, env=_environment(), stdout=-3, stderr=-3)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    took = time.perf_counter() - begin
    return {"clock": took, "processor": usage.ru_utime + usage.ru_stime, "bytes": usage.ru_maxrss * 1024}


def _environment() -> dict[str, str]:
    """The environment of commands: one thread, and cached bytecode, as for an installed package."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    bytecode = str(Path(tempfile.gettempdir()) / f"{ROOT.name}-bytecode")
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": bytecode}


def _first_steps(folder: Path) -> dict[str, float]:
    """Wall-clock seconds from the start of `dsc train` until it reports its first step."""
    folder.mkdir()
    train = ("train", *QUICKSTART, "--out")
    result = {"nothing there": _until_step((*train, "runs/a", "--steps", "1"), 1, folder)}
    result["build there"] = _until_step((*train, "runs/b", "--steps", "1"), 1, folder)
    result["build and data there"] = _until_step((*train, "runs/b", "--resume", "--steps", "2"), 2, folder)
    return result


def _until_step(words: tuple[str, ...], step: int, folder: Path) -> float:
    begin = time.perf_counter()
    process = subprocess.Popen(
        (*DSC, *words), cwd=folder, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    took = next(time.perf_counter() - begin for line in process.stdout if line.startswith(f"step {step}/"))
    process.stdout.read()
    assert process.wait() == 0, words
    return took


# ---------------------------------------------------------------- where the time goes


def _parts(words: tuple[str, ...], folder: Path) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "benchmarks.compile_speed", "--parts", *(f"={word}" for word in words)]
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, check=True)
    parts: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return parts


def parts_of(words: list[str]) -> dict[str, float]:
    """CPU seconds of each part of one compilation in this process. Each word is prefixed by `=`."""
    from compiler.cli.commands import compile as command  # imported here, as `dsc` does: imports count

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_intermixed_args([word.removeprefix("=") for word in words])
    gc.disable()  # as `dsc compile` does
    import_module("compiler.pipeline")
    spent = {"start, and imports but torch": time.process_time()}
    begin = time.process_time()
    with _watched(spent):
        assert command.run(args) == 0
    total_s = time.process_time() - begin + spent["start, and imports but torch"]
    return spent | {"the rest": total_s - sum(spent.values()), "whole": total_s}


def function_of(module: str, name: str) -> tuple[Any, str, Callable[..., Any]]:
    """(owner, name, function) of a function in a module, or of a method of a class there."""
    *classes, function = name.split(".")
    owner = functools.reduce(getattr, classes, import_module(module))
    return owner, function, getattr(owner, function)


@contextmanager
def _watched(spent: dict[str, float]) -> Iterator[None]:
    """In this context, the functions of the parts add their CPU seconds to `spent`."""
    originals = [function_of(module, name) for _, module, name in PARTS]
    inner = [0.0]

    def watched(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin, outer, inner[0] = time.process_time(), inner[0], 0.0
            try:
                return function(*args, **kwargs)
            finally:
                took = time.process_time() - begin
                spent[label] = spent.get(label, 0.0) + took - inner[0]
                inner[0] = outer + took

        return call

    for (label, _, _), (module, name, function) in zip(PARTS, originals, strict=True):
        setattr(module, name, watched(label, function))
    try:
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)


# ---------------------------------------------------------------- the page


def page(found: Mapping[str, Any]) -> str:
    """docs/compile-speed.md, from the unrounded results."""
    low, high = sorted(found["load"])
    return "\n".join(
        (
            f"""# How fast dsc compiles

How long commands take, and what `dsc compile` keeps. `python -m benchmarks.compile_speed` writes this page.

*Traced*: nothing was there before. *Kept*: [segments](#what-is-kept) are there. DeepSeek-V3, in FP8, has a program and
its proof for each of the {NUM_SIZES} sizes of its batch.
""",
            _commands(found),
            f"""{found["machine"]}, torch {found["torch"]}; medians of {found["rounds"]} rounds, {found["date"]}, at
a load of {low:.1f} to {high:.1f}.
""",
            "## Goals\n\n" + goals(found),
            _other_commands(found),
            _steps(found),
            _parts_table(found),
            _CACHE,
        )
    )


def median(found: Mapping[str, Any], name: str, cache: str, measure: str) -> float:
    return statistics.median(run[measure] for run in found["compiled"][name][cache])


def _commands(found: Mapping[str, Any]) -> str:
    lines = ["| `dsc compile` | segments | processor, s | most memory, MB |", "|---|---|--:|--:|"]
    for name in SPECS:
        for cache, label in (("cold", "traced"), ("kept", "kept")):
            processor, size = (median(found, name, cache, measure) for measure in ("processor", "bytes"))
            lines.append(f"| {name} | {label} | {processor:.1f} | {size / 1e6:,.0f} |")
    return "\n".join(lines) + "\n"


def goals(found: Mapping[str, Any]) -> str:
    """The table of goals and results."""
    growth = {
        cache: median(found, LARGE, cache, "processor") / median(found, SMALL, cache, "processor")
        for cache in ("cold", "kept")
    }
    largest = max(median(found, name, cache, "bytes") for name in SPECS for cache in growth)
    first = min(found["first_step_s"]["nothing there"])
    labels = {"cold": "traced", "kept": "kept"}
    rows = [
        *(
            (f"2,048 devices, {label}", median(found, SMALL, cache, "processor"), GOALS_S[cache], "s")
            for cache, label in labels.items()
        ),
        *(
            (f"from 2,048 to 131,072 devices, {label}", growth[cache], MOST_GROWTH, "×")
            for cache, label in labels.items()
        ),
        ("memory", largest / 2**30, 2.0, "GiB"),
        ("quickstart, until its first step", first, GOALS_S["first step"], "s"),
    ]
    lines = ["| | here | at most | |", "|---|--:|--:|---|"]
    lines += [
        f"| {text} | {value:.2f} {unit} | {goal:g} {unit} | {_verdict(value, goal)} |"
        for text, value, goal, unit in rows
    ]
    return "\n".join(lines) + f"\n\n{_BEST}"


def _verdict(value: float, goal: float) -> str:
    return "reached" if value <= goal else "not reached"


def _other_commands(found: Mapping[str, Any]) -> str:
    lines = ["## Other commands on DeepSeek-V3", "", "| | processor, s | at most | |", "|---|--:|--:|---|"]
    for label, (_, goal) in COMMANDS.items():
        value = statistics.median(run["processor"] for run in found["commands"][label])
        lines.append(f"| {label} | {value:.2f} | {goal:g} | {_verdict(value, goal)} |")
    return "\n".join(lines) + "\n"


def _steps(found: Mapping[str, Any]) -> str:
    lines = ["## Until the first step of the quickstart", ""]
    lines += ["| before | clock, s, median | best |", "|---|--:|--:|"]
    for before, seconds in found["first_step_s"].items():
        lines.append(f"| {before} | {statistics.median(seconds):.1f} | {min(seconds):.1f} |")
    return "\n".join(lines) + "\n"


def _parts_table(found: Mapping[str, Any]) -> str:
    """A row for each part of the small compilation that takes long enough; the others are in the rest."""
    columns = [dict(found["parts"][SMALL][cache]) for cache in ("cold", "kept")]
    labels = dict.fromkeys(label for column in columns for label in column if label not in ("the rest", "whole"))
    small = [label for label in labels if all(column.get(label, 0) < LEAST_S for column in columns)]
    lines = ["## Where the time goes", "", f"{SMALL}, processor seconds of one compilation:", ""]
    lines += ["| | traced | kept |", "|---|--:|--:|"]
    for column in columns:
        column["the rest"] = column.get("the rest", 0) + sum(column.pop(label, 0) for label in small)
    for label in (*(label for label in labels if label not in small), "the rest", "whole"):
        cells = (f"{column.get(label, 0):.2f}" for column in columns)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


_BEST = """Seconds of the processor; for the first step, the best round by the clock.
"""

_CACHE = """## What is kept

`dsc compile` keeps two kinds of files:

- **Traced segments.** A compilation that finds all of them imports no torch. A file's name is the digest of all that
  decides its text.
- **Orders of instructions** over the two lanes of a body.

All else is made anew, and every program is proven each time.

They are in the folder `cache` of the build, and serve this build alone. `--cache DIR`, also of `dsc train`, names a
folder that builds share, also at the same time. `--no-cache` reads and keeps nothing.

You may remove any entry at any time; nothing empties a shared folder. A damaged entry is made again. The digest detects
damage, not malice: whoever can write there can also write to the build.

Orders and schedules are searched in C, compiled at its first use, next to its source or in `DSC_NATIVE`. Without a C
compiler, Python finds the same ones in over twenty times the time.
"""


if __name__ == "__main__":
    sys.exit(main())

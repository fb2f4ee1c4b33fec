"""What tests and programs of the rows gave, kept in benchmarks/results/reliability.json."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.reliability.rows import Figure, Program, Row

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "reliability.json"
INTERRUPTED = 130  # exit code of a program that was ended by Ctrl-C and reports its progress


@dataclass
class Result:
    """Cases of one test function, or one program: how many passed, which failed, the numbers they recorded."""

    machine: str
    seconds: float = 0.0
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)


Results = dict[str, Result]


def kept() -> Results:
    records: dict[str, Any] = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
    return {name: Result(**fields) for name, fields in records.items()}


def keep(results: Results) -> None:
    fields = {name: asdict(result) for name, result in sorted(results.items())}
    KEPT.write_text(json.dumps(fields, indent=1) + "\n", "utf-8")


def machine() -> str:
    import torch

    kind = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    return (
        f"{cores} cores of {kind.partition(': ')[2] or platform.machine()}, Python {python}, torch {torch.__version__}"
    )


def run_tests(tests: Iterable[str]) -> Results:
    """Run functions of tests with all their cases, by function."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ("-q", f"--junitxml={report}", "-o", "junit_family=xunit1", "-o", "junit_duration_report=call")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run((sys.executable, "-m", "pytest", *options, *tests), cwd=ROOT, env=environment, check=False)
        return read_report(report.read_text("utf-8"), tests)


def read_report(text: str, tests: Iterable[str]) -> Results:
    """The results in a pytest report; functions without cases are left out."""
    this_machine, results = machine(), Results()
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = case.attrib["name"]
        test = f"{case.attrib['classname'].replace('.', '/')}.py::{name.partition('[')[0]}"
        assert test in tests, f"{test} is no test of these rows"
        result = results.setdefault(test, Result(this_machine))
        result.seconds = round(result.seconds + float(case.attrib["time"]), 1)
        if case.find("failure") is None and case.find("error") is None and case.find("skipped") is None:
            result.passed += 1
        else:
            result.failed.append(name)
        for entry in case.iter("property"):
            result.figures.setdefault(entry.attrib["name"], []).append(round(float(entry.attrib["value"]), 3))
    return results


def run_program(program: Program) -> Result:
    """Run a program. It passes with exit code 0; after SIGINT, its last output counts."""
    command = (sys.executable, "-m", program.module, *program.words)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = [*(process.stdout or ())]
    return read_output(program, process.returncode, lines)


def read_output(program: Program, code: int, lines: Iterable[str]) -> Result:
    """The result of a program by its exit code and what it printed."""
    matches = [match.groupdict() for line in lines if (match := re.search(program.figures, line))]
    figures = {name: [float(value.replace(",", ""))] for name, value in (matches[-1] if matches else {}).items()}
    failed = [] if matches and code in (0, INTERRUPTED) else [f"exit code {code}"]
    return Result(machine(), passed=int(code == 0 and bool(matches)), failed=failed, figures=figures)


def figures_of(row: Row, results: Results) -> dict[str, Figure]:
    """All numbers that a row's tests and programs recorded, and `cases`, the number of cases that passed."""
    values: dict[str, list[float]] = defaultdict(list)
    for result in of_row(row, results):
        for name, recorded in result.figures.items():
            values[name] += recorded
    cases = sum(results[test].passed for test in row.tests if test in results)
    return {name: Figure(tuple(numbers)) for name, numbers in values.items()} | {"cases": Figure((cases,))}


def of_row(row: Row, results: Results) -> list[Result]:
    return [results[name] for name in (*row.tests, *(program.name for program in row.programs)) if name in results]


def lacking(row: Row, results: Results) -> list[str]:
    """Return the tests and programs of a row that have not been run."""
    return [name for name in (*row.tests, *(program.name for program in row.programs)) if name not in results]

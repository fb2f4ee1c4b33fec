"""Measures the seconds of the processor that each test and each fixture takes, with the processes that they start.

`pytest -p tests.measure.costs --costs=FOLDER` writes a line for each test, and for each set-up of a fixture, into a
file of FOLDER for each worker.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """Seconds of the processor of this process, its living descendants, and those that were waited for."""
    seconds = sum(time_of(process) for process in descendants(os.getpid()))
    times = os.times()
    return seconds + time.process_time() + times.children_user + times.children_system


def descendants(process: int) -> list[int]:
    processes = []
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            children = (task / "children").read_text()
        except OSError:  # it has ended
            continue
        for child in map(int, children.split()):
            processes += [child, *descendants_or_none(child)]
    return processes


def descendants_or_none(process: int) -> list[int]:
    try:
        return descendants(process)
    except OSError:  # it has ended
        return []


def time_of(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def named(fixture: pytest.FixtureDef[object]) -> str:
    """Return the name of a fixture after the folder or file that defines it."""
    return f"{fixture.baseid}::{fixture.argname}"


def fixtures_of(item: pytest.Item) -> list[str]:
    """The fixtures of a test that other tests share."""
    definitions = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return [named(defs[-1]) for defs in definitions if defs[-1].scope != "function"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="write what each test costs into this folder")


class Costs:
    """Writes the seconds of tests and fixtures, in order, into a file of this process."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.outcome = "passed"  # of the test that runs
        self.fixtures = 0.0  # seconds of the fixtures that the test that runs has set up first

    def write(self, **row: object) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        began, inner = processor_seconds(), self.fixtures
        try:
            return (yield)
        finally:
            seconds = processor_seconds() - began - (self.fixtures - inner)
            self.fixtures += seconds
            self.write(fixture=named(fixturedef), seconds=round(seconds, 4))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.fixtures, self.outcome = 0.0, "passed"
        began, clock = processor_seconds(), time.monotonic()
        try:
            return (yield)
        finally:
            seconds = processor_seconds() - began
            self.write(
                test=item.nodeid,
                seconds=round(seconds - self.fixtures, 4),
                wall=round(time.monotonic() - clock, 4),
                outcome=self.outcome,
                fixtures=fixtures_of(item),
            )

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.outcome = report.outcome


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--costs")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        config.pluginmanager.register(Costs((folder / f"{worker}.jsonl").open("w")))

"""`python -m tests.measure.mutants FOLDER`: which of some 300 small changes of product code the tests notice.

1. The tests of a tier run once, in a copy of the project with a probe at each place to change. This shows which
   tests execute which place, and what each test costs.
2. Each change is made in a copy of the project, and the tests that execute it run, cheapest first, until one fails.

With several tiers, a later one only runs for changes that earlier ones did not notice. If only
tests changed since FOLDER was measured, `--measure` runs their files with probes, and unnoticed changes are tried
again. Results are kept in FOLDER, so that a stopped run continues. docs/testing.md shows how to look at a mutant.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from tests import progress
from tests.measure import workplace
from tests.measure.sites import Mutant, choose, with_probes

ROOT = Path(__file__).parents[2]
COUNT = 300
PROBED = 3000  # probed places: tests.measure.choose reads all of them, COUNT become mutants
SEED = 0
WORKERS = 2
BATCHES_S = (4.0, 12.0, 50.0)  # processor seconds of the tests in each batch; tests beyond the last batch are not run
FILE_S = 0.5  # to import a test file
PLACE_S = 0.003  # for the order of tests, each executed place counts as this many seconds
OF_A_FUNCTION = (2, 4)  # cases of a test function in the first batches, at most: they mostly fail together
SLOWER, MORE_S = 10, 60  # tests that take SLOWER times as long plus MORE_S seconds will never end
PLACES = "places.json"  # file in a folder of lines: the digests of the places, by their numbers
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass
class Measured:
    """A measured test: its CPU seconds, those of shared fixtures, and the executed places."""

    id: str
    seconds: float = 0.0
    of_fixtures: float = 0.0
    executed: set[str] = field(default_factory=set)  # by the digests of their lines

    def alone(self) -> float:
        """Seconds of the test if it runs alone."""
        return max(0.0, self.seconds) + self.of_fixtures

    @property
    def function(self) -> str:
        return self.id.partition("[")[0]

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]


def read_rows(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """The lines of tests.measure.probes, by the process that wrote them."""
    for file in sorted(folder.glob("*.jsonl")):
        yield [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def measured_in(folder: Path, tier: str) -> list[Path]:
    """The folders with the lines of a tier, the newest last."""
    return sorted(folder.glob(tier)) + sorted(folder.glob(f"{tier}~*"))


def read_tests(folder: Path) -> dict[str, Measured]:
    """The tests whose lines are in a folder of tests.measure.probes, by their ids."""
    tests: dict[str, Measured] = {}
    places: list[str] = json.loads((folder / PLACES).read_text("utf-8"))
    for rows in read_rows(folder):
        fixtures: dict[str, Measured] = defaultdict(lambda: Measured(""))
        for row in rows:
            if "fixture" in row:
                fixture = fixtures[row["fixture"]]
                fixture.seconds += row["seconds"]
                fixture.executed.update(places[number] for number in row["executed"])
            elif row["outcome"] == "passed":
                executed = {places[number] for number in row["executed"]}
                test = tests[row["test"]] = Measured(row["test"], row["seconds"], executed=executed)
                for name in row["fixtures"]:
                    test.of_fixtures += fixtures[name].seconds
                    test.executed |= fixtures[name].executed
    return tests


def batches(tests: Iterable[Measured]) -> Iterator[list[str]]:
    """Tests in the order to run them in: first a few cases of tests that are cheap and execute little else."""
    remaining = sorted(tests, key=lambda test: test.alone() + PLACE_S * len(test.executed))
    for limit, max_cases in itertools.zip_longest(BATCHES_S, OF_A_FUNCTION):
        files, cases = set[str](), defaultdict[str, int](int)
        total, batch, postponed = 0.0, list[str](), list[Measured]()
        for test in remaining:
            seconds = test.alone() + FILE_S * (test.file not in files)
            few = max_cases is None or cases[test.function] < max_cases
            if few and (not batch or total + seconds <= limit):
                batch.append(test.id)
                total += seconds
                files.add(test.file)
                cases[test.function] += 1
            else:
                postponed.append(test)
        if batch:
            yield batch
        remaining = postponed


class UsageError(Exception):
    """A test that pytest was asked for does not exist."""


class Place:
    """A copy of the project in which one mutant at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = workplace.make(ROOT, folder)
        self.passes = dict[str, bool]()  # whether a test passes without any mutant

    def notices(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> str | None:
        """The first of these tests that fails with the mutant and passes without it; None where there is none."""
        remaining = list(tests)
        while remaining:
            try:
                failed = self.run(mutant, remaining, seconds)
            except UsageError:
                self.pytest(remaining, seconds)  # fails again unless the mutant is the reason that a test is not found
                failed = remaining[0]
            if failed is None:
                return None
            if failed not in self.passes:
                self.passes[failed] = self.pytest([failed], seconds) is None
            if self.passes[failed]:
                return failed
            remaining = [test for test in remaining if test != failed]
        return None

    def run(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> str | None:
        """Make the mutant, run tests, and take it back. Return the test that failed first; None if all passed."""
        file = self.folder / mutant.file
        source, times = file.read_bytes(), file.stat()
        file.write_bytes(mutant.apply(source))  # and with a new time, so that old bytecode is not used
        try:
            return self.pytest(tests, seconds)
        finally:
            file.write_bytes(source)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def pytest(self, tests: Sequence[str], seconds: float) -> str | None:
        """Run tests until one fails. Return that test; None if all passed."""
        with tempfile.TemporaryDirectory(prefix="mutant-") as temporary:
            names, log = Path(temporary, "tests"), Path(temporary, "out")
            names.write_text("\n".join(tests))
            words = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={temporary}/t", f"@{names}"]
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    [self.python, "-m", "pytest", *words],
                    cwd=self.folder,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                )
                ended = self.end(process, SLOWER * seconds + MORE_S)
            output = log.read_text("utf-8", "replace")
        if ended and process.returncode == 0:
            return None
        if process.returncode == pytest.ExitCode.USAGE_ERROR:
            raise UsageError(output[-2000:])
        failed = FAILED.search(output)
        return failed[1] if failed else tests[0]  # the process ended in another way, or would never end

    @staticmethod
    def end(process: subprocess.Popen[bytes], most_s: float) -> bool:
        """Wait for the end, and kill a process that hangs. Returns whether it ended by itself."""
        watch = progress.Watch(process.pid)
        try:
            while True:
                try:
                    process.wait(0.2)
                    return True
                except subprocess.TimeoutExpired:
                    watch.look()
                    if progress.processor_s(process.pid) > most_s:
                        return False
        except progress.HangError:
            return False
        finally:
            if process.poll() is None:
                progress.kill(process.pid)
                process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def probe(folder: Path, tier: str, mutants: Sequence[Mutant], tests: Sequence[str] = ()) -> None:
    """Run the tests of a tier, or of the files `tests`, with probes. Writes their lines into `folder`."""
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.rmtree(copy, ignore_errors=True)
    python = workplace.make(ROOT, copy)
    files: dict[str, list[tuple[int, Mutant]]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        files[mutant.file].append((number, mutant))
    for file, numbered_mutants in files.items():
        (copy / file).write_bytes(with_probes((ROOT / file).read_bytes(), numbered_mutants))
    workplace.store_bytecode(copy)
    words = ["-n", "3", "--dist", "loadscope", "--no-loadscope-reorder", "--max-worker-restart", "0", "--tier", tier]
    # Each option is one word: pytest takes a separate path for a test path, and moves its rootdir there.
    plugin = ["-p", "tests.measure.probes", f"--probes={len(mutants)}", f"--costs={folder}"]
    subprocess.run(
        [python, "-m", "pytest", *words, *plugin, *tests],
        cwd=copy,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    (folder / PLACES).write_text(json.dumps([mutant.digest for mutant in mutants]), "utf-8")
    shutil.rmtree(copy)


class Verdict(NamedTuple):
    """The result for one mutant. `digest`: of its line. `noticed_by`: the test that failed, or None. `executing`: the
    number of tests that execute its place. `ran`: the number of those that were run."""

    digest: str
    mutant: str
    package: str
    tier: str
    noticed_by: str | None
    executing: int
    ran: int


def read_verdicts(kept: Path) -> list[Verdict]:
    return [Verdict(**json.loads(line)) for line in kept.read_text("utf-8").splitlines()] if kept.exists() else []


def judge(
    kept: Path,
    tier: str,
    tests: dict[str, Measured],
    mutants: Sequence[Mutant],
    probed: Sequence[Mutant],
    again: bool = False,
) -> None:
    """Find tests that notice mutants, and add a line to the file `kept` for each. `again`: also retry unnoticed ones.

    If no test executes the place of a mutant, tests that execute another place of the file run.
    """
    of_file = defaultdict[str, list[Measured]](list)
    files = {mutant.digest: mutant.file for mutant in probed}
    for test in tests.values():
        for file in {files[digest] for digest in test.executed if digest in files}:
            of_file[file].append(test)
    judged = {
        verdict.digest for verdict in read_verdicts(kept) if verdict.tier == tier and (verdict.noticed_by or not again)
    }
    places: SimpleQueue[Place] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary, ThreadPoolExecutor(WORKERS) as pool:
        for number in range(WORKERS):
            places.put(Place(Path(temporary, str(number))))

        def one(mutant: Mutant) -> None:
            if mutant.digest in judged:
                return
            executing = [test for test in tests.values() if mutant.digest in test.executed] or of_file[mutant.file]
            noticed_by, ran, place = None, 0, places.get()
            try:
                for batch in batches(executing):
                    ran += len(batch)
                    noticed_by = place.notices(mutant, batch, sum(tests[test].alone() for test in batch))
                    if noticed_by:
                        break
            finally:
                places.put(place)
            title = title_of(mutant)
            verdict = Verdict(mutant.digest, title, mutant.package, tier, noticed_by, len(executing), ran)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(verdict._asdict()) + "\n")
            print(f"{title}: {noticed_by or f'NOT NOTICED by {ran} of {len(executing)} tests'}", flush=True)

        for future in [pool.submit(one, mutant) for mutant in mutants]:
            future.result()


def title_of(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line} {mutant.describe((ROOT / mutant.file).read_bytes())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiers", nargs="+", default=["test"])
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--measure", nargs="+", default=[], metavar="FILE", help="of tests that are new or changed")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    probed = choose(ROOT, PROBED, options.seed)
    chosen = choose(ROOT, options.count, options.seed)
    verdicts_path = options.folder / "verdicts.jsonl"
    for tier in options.tiers:
        folders = measured_in(options.folder, tier)
        if not folders or options.measure:
            folders.append(options.folder / (f"{tier}~{len(folders)}" if folders else tier))
            probe(folders[-1], tier, probed, options.measure)
        tests: dict[str, Measured] = {}
        for folder in folders:  # for a file that was measured again, the last measurement counts
            measured = read_tests(folder)
            files = {test.file for test in measured.values()}
            tests = {name: test for name, test in tests.items() if test.file not in files} | measured
        noticed = {verdict.digest for verdict in read_verdicts(verdicts_path) if verdict.noticed_by}
        todo = [mutant for mutant in chosen if mutant.digest not in noticed]
        judge(verdicts_path, tier, tests, todo, probed, again=bool(options.measure))
    digests = {mutant.digest for mutant in chosen}
    verdicts = {
        (verdict.digest, verdict.tier): verdict for verdict in read_verdicts(verdicts_path) if verdict.digest in digests
    }
    for tier in options.tiers:
        of_tier = [verdict for verdict in verdicts.values() if verdict.tier == tier]
        print(f"{tier}: {sum(verdict.noticed_by is not None for verdict in of_tier)} of {len(of_tier)} noticed")


if __name__ == "__main__":
    main()

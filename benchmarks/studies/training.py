"""Trains the runs of a study without results, several concurrently, with `dsc train` or the variant's program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.studies.records import Results, about, read_results, record_of, write_results
from benchmarks.studies.study import ROOT, Run, Study, tenth
from dsl.messages.diagnostics import SpecError

EXIT_SPEC = 2  # exit code of dsc for an invalid or refused spec
REASON = re.compile(r"^error\[E\d+\]: (.*)$", re.MULTILINE)  # errors without a code are not about the spec
POLL_S = 0.2
STOP_S = 120  # time for a run to save and stop, also on a busy machine


@dataclass
class Training:
    """A run in progress."""

    run: Run
    digest: str
    folder: Path
    process: subprocess.Popen[bytes]
    begin: float


@dataclass
class Trainings:
    """Trains the runs of a study."""

    study: Study
    path: Path  # of the results
    work: Path  # folder for the runs
    most: int  # concurrent runs
    only: tuple[str, ...] = ()  # names of the variants to train; (): all

    def complete(self) -> tuple[Results, list[str]]:
        """Train the missing runs. Returns all results and the names of the runs that failed.

        A run whose spec has changed is trained again. A stopped run continues from its last checkpoint.
        """
        results = read_results(self.path, self.study)
        results.refused, results.steps = {}, self.study.steps
        waiting = [pair for pair in self.missing(results) if not self.only or pair[0].variant.name in self.only]
        active: list[Training] = []
        failed: list[str] = []
        _say(f"{self.study.name}: {len(waiting)} runs of {results.steps:,} steps to train")
        try:
            while waiting or active:
                waiting = [(run, digest) for run, digest in waiting if run.variant.name not in results.refused]
                while waiting and len(active) < self.most:
                    active.append(self._start(*waiting.pop(0)))
                ended = [training for training in active if training.process.poll() is not None]
                for training in ended:
                    active.remove(training)
                    failed += self._end(training, results)
                    _say(f"{self.study.name}: {len(waiting) + len(active)} runs left")
                time.sleep(0 if ended else POLL_S)
        finally:
            _stop([training.process for training in active])
        write_results(self.path, results)
        return results, failed

    def missing(self, results: Results) -> list[tuple[Run, str]]:
        """(run, digest of its spec) for runs without a result for their current spec. Variants with invalid specs are
        recorded as refused."""
        missing = []
        for run in self.study.runs():
            try:
                digest = self.study.digest(run)
            except SpecError as error:
                results.refused[run.variant.name] = error.diagnostics[0].message
                results.runs.pop(run.name, None)
                continue
            if run.name not in results.runs or results.runs[run.name].digest != digest:
                results.runs.pop(run.name, None)
                missing.append((run, digest))
        return missing

    def _start(self, run: Run, digest: str) -> Training:
        folder = self.work / run.name
        marker = folder / "digest"
        if folder.exists() and not (marker.exists() and marker.read_text("ascii") == digest):
            shutil.rmtree(folder)  # it was trained from another spec
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(digest, "ascii")
        saves = (f"train.checkpoint.every={tenth(self.study.steps)} steps", "train.checkpoint.keep=4")
        overrides = [word for override in (*self.study.words(run), *saves) for word in ("-s", override)]
        program = (run.variant.program,) if run.variant.program else ("compiler.cli.main", "train")
        command = [sys.executable, "-m", *program, str(self.study.spec), *overrides]
        command += ["--out", "run", "--resume", "--cache", str(self.work / "cache")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        _say(f"{self.study.name}: {run.name} begins")
        return Training(run, digest, folder, process, time.monotonic())

    def _end(self, training: Training, results: Results) -> list[str]:
        """Record the result of a run that ended. Returns its name if it failed."""
        run, code = training.run, training.process.returncode
        log = (training.folder / "log").read_text("utf-8", "replace")
        reason = REASON.search(log)
        if code == EXIT_SPEC and reason:
            results.refused[run.variant.name] = reason[1]
            _say(f"{self.study.name}: {run.name} is refused: {results.refused[run.variant.name]}")
        elif code:
            _say(f"{self.study.name}: {run.name} failed with exit code {code}; see {training.folder / 'log'}")
            return [run.name]
        else:
            record = record_of(run, training.digest, training.folder / "run")
            results.runs[run.name] = record
            results.about = about()
            took = time.monotonic() - training.begin
            _say(f"{self.study.name}: {run.name} ended after {took:.0f} s with a loss of {record.last_loss:.4f}")
            write_results(self.path, results)
        shutil.rmtree(training.folder)
        return []


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask runs to save and stop, then kill those that did not."""
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for process in processes:
            if process.poll() is None:
                end(process)
        until = time.monotonic() + STOP_S
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            time.sleep(POLL_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

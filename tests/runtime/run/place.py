"""A user's folder: a spec, a corpus of real files, and `dsc` commands run in it as users run them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from compiler.tools.report.page import build_pages
from dsl.load import load
from runtime.checkpoint.publish import LoadedCheckpoint
from runtime.checkpoint.publish import load as load_checkpoint
from tests import forks, progress
from tests.progress import children
from tests.runtime.processes import is_gone, started, wait_for

DSC = (sys.executable, "-P", "-m", "compiler.cli.main")
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
EVERY = 3  # steps between checkpoints
CORPUS = ("bisect", "contextlib", "copy", "fnmatch", "heapq", "shlex", "string", "textwrap")
# Keys that may differ between equal runs.
TIMINGS = ("tokens_per_s", "step_s", "time", "spent_s", "spent_most_s", "slowest_rank", "process_bytes")
TIMINGS += ("straggler", "straggler_factor")

TINY = """
run {name} {{
  model = tiny, cluster = here, precision = {precision}
  parallel {{ pipeline = {pipeline}, expert = {expert}, data = auto{degrees}, zero = {zero} }}
  schedule {{ name = {schedule} }}
  train {{
    sequence = 16, micro_batch = 1, batch = {batch}, steps = {steps}
    optimizer adamw {{ weight_decay = {decay}, clip = 1.0 }}
    rate {{
      warmup 2 steps to {rate}
      constant
    }}
    seed = 1
    checkpoint {{ every = 3 steps, keep = {keep} }}
    validate {{ every = 3 steps, batches = 2{validate} }}
    {more}
  }}
  data {{ source = "{source}", tokenizer = train(300), validation = 30% }}
  {metrics}
}}
cluster here {{ nodes = 1, node {{ devices = {devices}, device cpu {{ cores = 1, memory = 4GB }} }} }}
"""
V3 = """
model tiny {{
  vocab = 300, hidden = 16, init_std = 0.02, norm_eps = 1e-6
  attention mla {{
    heads = 2, query_rank = 8, kv_rank = 8
    head_dim {{ nope = 8, rope = 4, value = 8 }}
    rope {{ theta = 10_000 }}
  }}
  layers 0..0 {{ ffn dense {{ inner = 32 }} }}
  layers 1..1 {{
    ffn moe {{
      experts = 4, shared = 1, top_k = {top_k}, inner = 16
      groups = 2, top_groups = 1
      score = sigmoid, normalize = true, scale = 2.5
      balance {{ bias_rate = 0.001, sequence_loss = 1e-4 }}
    }}
  }}
  mtp {{ depth = 1, weight = 0.3 }}
}}
"""
DENSE = """
model tiny {{
  vocab = 300, hidden = 16, init_std = 0.02, norm_eps = 1e-6
  attention gqa {{ heads = 4, kv_heads = 2, head_dim = 4, rope {{ theta = 10_000 }} }}
  layers 0..1 {{ ffn dense {{ inner = 32 }} }}
}}
"""
SOFTMAX = """
model tiny {{
  vocab = 300, hidden = 16, init_std = 0.02, norm_eps = 1e-6
  attention gqa {{ heads = 4, kv_heads = 1, head_dim = 4, qk_norm = true, rope {{ theta = 10_000 }} }}
  layers 0..1 {{
    ffn moe {{ experts = 4, shared = 0, top_k = {top_k}, inner = 16, score = softmax, normalize = true }}
  }}
}}
"""
FOUR_RANKS = dict(name="tiny", pipeline=2, expert=2, zero=0, schedule="dualpipe", devices=4)
ONE_RANK = dict(FOUR_RANKS, pipeline=1, expert=1, schedule="1f1b", devices=1)
USUAL = dict(model=V3, precision="fp32", batch=8, steps=6, rate="2e-3", decay=0.1, source="corpus/*.py", top_k=2)
USUAL |= dict(validate="", more="", metrics="", degrees="", keep=100)


def spec_text(settings: dict[str, Any]) -> str:
    values = USUAL | settings
    return (TINY + values["model"]).format(**values)


@dataclass
class Place:
    """`segments`: those traced so far, shared by the places of a session."""

    folder: Path
    segments: Segments

    def write(self, settings: dict[str, Any], file: str = "tiny.dsc") -> Path:
        """Write a spec, and its corpus beside it."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(spec_text(settings), "utf-8")
        corpus = path.parent / "corpus"
        if not corpus.exists():
            corpus.mkdir()
            for name in CORPUS:
                shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py", corpus)
        return path

    def compile(self, settings: dict[str, Any], file: str = "tiny.dsc") -> Path:
        """Write the spec, and its build where `dsc train` looks for it: faster than `dsc compile`, the same bytes."""
        build = self.folder / "build" / settings["name"]
        write_build(
            build, compile_spec(load(self.write(settings, file)), segments=self.segments, pages=build_pages).files
        )
        return build

    def dsc(
        self, *words: object, code: int = 0, cwd: Path | None = None, anew: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run `dsc` to its end, and assert its exit code. anew: start it as a user does, for tests of that; else in
        forks (tests/forks.py), since importing torch takes most of the time of a short run."""
        folder, arguments = cwd or self.folder, [*map(str, words)]
        if anew:
            return run((*DSC, *arguments), code, folder)
        return ended(forks.run("compiler.cli.main", arguments, folder), code)

    def at_once(self, *commands: Sequence[object]) -> list[subprocess.CompletedProcess[str]]:
        """Run several `dsc` commands to their ends, in concurrent forks."""
        forks.server()
        with ThreadPoolExecutor(len(commands)) as pool:
            return [*pool.map(lambda words: forks.run("compiler.cli.main", [*map(str, words)], self.folder), commands)]

    @contextmanager
    def started(self, *words: object, anew: bool = False) -> Iterator[Running]:
        """A running `dsc`. Afterwards no process of it is left, whatever the test did. anew: start as a user does."""
        start = forks.start_anew if anew else forks.start
        stdout, stderr = self.folder / "stdout", self.folder / "stderr"
        stdout.write_bytes(b"")
        stderr.write_bytes(b"")
        process = start("compiler.cli.main", list(map(str, words)), self.folder, stdout, stderr)
        running = Running(process, self.folder)
        try:
            yield running
        finally:
            for pid in running.seen():
                with suppress(ProcessLookupError):  # it ended meanwhile, together with another
                    os.kill(pid, signal.SIGKILL)
            progress.end(process)


def run(command: tuple[str, ...], code: int, cwd: Path) -> subprocess.CompletedProcess[str]:
    return ended(progress.run(command, cwd), code)


def ended(done: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}{done.stderr}"
    return done


@dataclass
class Running:
    """A `dsc train` and its descendants."""

    process: forks.Started
    folder: Path
    _seen: dict[int, int] = field(default_factory=dict)  # process id → when it started

    def seen(self) -> tuple[int, ...]:
        """Every process that was ever seen to descend from it, including itself, in the order of their starts.

        The id of an ended process may belong to another by now, which must not be killed.
        """
        pids = [self.process.pid]
        for pid in pids:
            pids += children(pid)
        for pid in pids:
            self._seen.setdefault(pid, started(pid))
        return tuple(pid for pid, start in self._seen.items() if started(pid) in (0, start))

    def ranks(self, run: Path) -> dict[int, int]:
        """Rank → process id, from the log that each has open."""
        logs = {str((run / "logs" / f"rank_{rank}.log").resolve()): rank for rank in range(64)}
        return {logs[log]: pid for pid in self.seen() if (log := _output(pid)) in logs}

    def wait_for_step(self, run: Path, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.stderr()
            return has_reached(run, step)

        wait_for(reached, f"step {step}")
        self.seen()

    def ends(self) -> int:
        """Wait until the process and all its descendants have ended. Returns its exit code."""
        code = progress.end(self.process, self._printed_bytes)
        wait_for(lambda: all(map(is_gone, self.seen())), "the end of every process of the run")
        return code

    def _printed_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in ("stdout", "stderr"))

    def stdout(self) -> str:
        return (self.folder / "stdout").read_text("utf-8")

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text("utf-8")


def _output(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


# ---------------------------------------------------------------- the files of a run


def rows(run: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def has_reached(run: Path, step: int) -> bool:
    """Whether a run has trained up to `step` and, after the first saved step, whether it has a checkpoint."""
    return len(rows(run)) >= step and (step <= EVERY or (run / "checkpoints" / "LATEST").exists())


def untimed(run: Path) -> list[dict[str, Any]]:
    """The rows without timings."""
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in rows(run)]


def saved(run: Path, step: int | None = None) -> LoadedCheckpoint:
    """The newest checkpoint of a run, or that of a step, with all bytes verified."""
    return load_checkpoint(run / "checkpoints" / (f"step-{step:08d}" if step is not None else ""))


def bits(checkpoint: LoadedCheckpoint) -> dict[str, tuple[str, bytes]]:
    """Every logical tensor as (dtype, bytes), to compare checkpoints bit by bit."""
    tensors: dict[str, Tensor] = checkpoint.read(checkpoint.shapes)
    return {
        name: (str(tensor.dtype), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }

"""Ranks of a test: `python -m tests.gpu.device_path FOLDER WORLD` runs a step of FOLDER/build on the pretend device.

NCCL is simulated too. Each rank writes FOLDER/rank_<r>.txt, what its device would see, in order, and
FOLDER/rank_<r>.json, how often the host waits during each action; and FOLDER/calls_<r>.json, its calls of kernels, in
the form of launches.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch

from runtime.build.build import Build
from runtime.comm.connect import Endpoint
from runtime.contract import LaunchList
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.launch.rank_watch import Supervision
from runtime.step.trainer import Trainer
from runtime.system.strict_json import pretty
from tests.gpu.pretend import DEVICE, SEEN, Kind, pretended
from tests.gpu.pretend_nccl import nccl
from tests.runtime.step.samples import RandomSamples, steady_weight

WITHIN = ("recv ", "counts ", "dispatch ", "combine ")  # actions of a rank within a call of its program
BLOCKING = ("host waits", "blocking copy")


class Record:
    """What a device would see, in sections: one for each call of a program, and one for each other part of a step.

    It is also the rank's board, which receives its actions. A call equal to an earlier one of its body is one line.
    """

    def __init__(self) -> None:
        self.sections: list[tuple[str, list[str]]] = []
        self.blocking: dict[str, Counter[str]] = {}  # action → kinds

    def set_action(self, text: str) -> None:
        if not text.startswith(WITHIN):
            self.sections.append((text, []))
        self.action = text

    def see(self, kind: Kind, what: str, stream: str) -> None:
        self.sections[-1][1].append(f"  {kind} {what}" + (f" · on stream {stream}" if stream != "compute" else ""))
        if kind in BLOCKING:
            self.blocking.setdefault(self.action, Counter())[kind] += 1

    def text(self) -> str:
        lines: list[str] = []
        first_labels: dict[tuple[str, ...], str] = {}
        for label, section in self.sections:
            body = re.sub(r"\.\d+", "", label)
            before = first_labels.setdefault((body, *section), label)
            lines += [f"{label}: as {before}"] if before != label else [f"{label}:", *_folded(section)]
        return "\n".join(lines) + "\n"


def _folded(lines: list[str]) -> list[str]:
    """The lines; of several that are equal, one with how many there are."""
    counted: list[tuple[str, int]] = []
    for line in lines:
        if counted and counted[-1][0] == line:
            counted[-1] = line, counted[-1][1] + 1
        else:
            counted.append((line, 1))
    return [line + (f" × {count}" if count > 1 else "") for line, count in counted]


def main(folder: Path, world: int) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        record = Record()
        record.set_action("start")
        with ExitStack() as stack:
            stack.enter_context(pretended(record.see))
            stack.enter_context(nccl())
            build = Build.open(folder / "build")
            samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
            trainer = Trainer(build, rank, samples, samples, record, Endpoint(DEVICE))
            for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
                bucket.set_weight(entry, torch.from_numpy(steady_weight(entry.name, entry.shape)))
            record.sections.clear()
            record.set_action("step")
            trainer.train_step()
        (folder / f"rank_{rank}.txt").write_text(record.text(), "utf-8")
        (folder / f"rank_{rank}.json").write_text(json.dumps(record.blocking), "utf-8")
        (folder / f"calls_{rank}.json").write_text(pretty(LaunchList(tuple(SEEN.calls))), "utf-8")

    outcome = launch(
        target, world, folder=folder, supervision=Supervision(hang_timeout_s=120), backend="gloo" if world > 1 else None
    )
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

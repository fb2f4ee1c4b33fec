"""`dsc eval --ranks spec`: the loss by the compiled program, on the ranks of the run's spec. It validates like the run.

Where `dsc train` has left the build of the run's spec, that is used; otherwise the spec is compiled into a folder that
is removed afterwards.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from compiler.plan.actions.order import Orders
from compiler.plan.read_files import with_files
from compiler.tools.inference.evaluation import NO_TARGET, EvaluatedLoss, Ids, windows
from compiler.tools.inference.sources import InferenceError, ModelSource
from compiler.tools.processes import call
from compiler.tools.report.page import build_pages
from compiler.tools.training import fresh
from dsl.schema import Spec
from dsl.schema.train import Validate
from runtime.build.files import CACHE
from runtime.contract import EXTRA_TOKENS

LOSSES, SAMPLES = "losses.json", "samples.npy"


class RanksFailedError(Exception):
    """The ranks have not come to their end; they have said why. `code`: their exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def loss_on_ranks(
    source: ModelSource, streams: Sequence[Ids], average: bool, progress: Callable[[str], None]
) -> EvaluatedLoss:
    """The loss of all tokens of some streams but the first of each.

    Raises InferenceError, or RanksFailedError.
    """
    spec = _validating(source)
    with tempfile.TemporaryDirectory(prefix="dsc-eval-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        np.save(folder / SAMPLES, samples(streams, spec.train.sequence))
        build = Path("build") / spec.name
        if fresh(build, spec) is None:
            cache, build = build / CACHE, folder / "build"
            write_build(build, compile_spec(spec, progress, Segments(cache), Orders(cache), build_pages).files)
        progress(f"compute on {spec.parallel.pipeline * spec.parallel.columns} ranks")
        command = ["runtime.run.evaluate", str(build), "--checkpoint", str(source.checkpoint.path)]
        command += ["--samples", str(folder / SAMPLES), "--out", str(folder), *["--average"] * average]
        try:
            code = call(command)
        finally:
            progress("")
        if code:
            raise RanksFailedError(code)
        found = json.loads((folder / LOSSES).read_text("utf-8"))
    return EvaluatedLoss(found["loss"] * found["tokens"], found["tokens"])


def _validating(source: ModelSource) -> Spec:
    """The run's spec with the files that it names, and with a validation. What its weights began with, and its
    rewards, are not read."""
    train, data = source.spec.train, source.spec.data
    validating = {"validate": train.validate or Validate(every=1), "initial": None, "grpo": None}
    spec = source.spec.model_copy(
        update={
            "train": train.model_copy(update=validating),
            "data": data.model_copy(update={"prompts": None}),
        }
    )
    if any((spec.schedule.file, spec.parallel.placement, spec.cluster.rates)):
        if source.run is None:
            raise InferenceError(
                "the run's folder is not there, with the files that its spec names", "leave --ranks out"
            )
        spec = with_files(spec, {}, source.run)
    return spec


def samples(streams: Sequence[Ids], sequence: int) -> Ids:
    """The windows of all streams as samples of training, a row each."""
    rows = list(_rows(streams, sequence))
    found = np.full((len(rows), sequence + EXTRA_TOKENS), NO_TARGET, np.int64)
    for index, row in enumerate(rows):
        found[index, : len(row)] = row
    return found


def _rows(streams: Sequence[Ids], sequence: int) -> Iterator[Ids]:
    for stream in streams:
        for tokens, targets in windows(stream, sequence):
            yield np.append(tokens, targets[-1:])

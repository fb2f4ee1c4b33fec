"""`dsc eval --ranks spec`: the loss computed by the compiled program, on the ranks of the run's spec, as in validation.

Uses the build that `dsc train` left, if it matches the run's spec. Otherwise compiles the spec into a temporary folder.
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
    """The ranks failed and have printed why. `code`: their exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def loss_on_ranks(
    source: ModelSource, streams: Sequence[Ids], average: bool, progress: Callable[[str], None]
) -> EvaluatedLoss:
    """The loss of all tokens of the streams, except the first token of each.

    Raises InferenceError, or RanksFailedError.
    """
    spec = _spec_with_validation(source)
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
        losses = json.loads((folder / LOSSES).read_text("utf-8"))
    return EvaluatedLoss(losses["loss"] * losses["tokens"], losses["tokens"])


def _spec_with_validation(source: ModelSource) -> Spec:
    """The run's spec with `validate`, and with the contents of the files that it names; without initial weights,
    rewards and prompts."""
    train, data = source.spec.train, source.spec.data
    changes = {"validate": train.validate or Validate(every=1), "initial": None, "grpo": None}
    spec = source.spec.model_copy(
        update={
            "train": train.model_copy(update=changes),
            "data": data.model_copy(update={"prompts": None}),
        }
    )
    if any((spec.schedule.file, spec.parallel.placement, spec.cluster.rates)):
        if source.run is None:
            raise InferenceError("the run folder with the files that its spec names is missing", "leave --ranks out")
        spec = with_files(spec, {}, source.run)
    return spec


def samples(streams: Sequence[Ids], sequence: int) -> Ids:
    """The windows of all streams as training samples. Shape: (windows, sequence + EXTRA_TOKENS)."""
    rows = list(_rows(streams, sequence))
    table = np.full((len(rows), sequence + EXTRA_TOKENS), NO_TARGET, np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def _rows(streams: Sequence[Ids], sequence: int) -> Iterator[Ids]:
    for stream in streams:
        for tokens, targets in windows(stream, sequence):
            yield np.append(tokens, targets[-1:])

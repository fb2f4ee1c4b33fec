"""dsc from Python, for example in a notebook: five functions over the code of the commands.

    import dsc_trainer as dsc

    dsc.check("specs/quickstart.dsc")                          # () if nothing is wrong
    print(dsc.plan("specs/deepseek-v3.dsc"))                   # time, memory and money, in seconds
    build = dsc.compile("specs/quickstart.dsc", {"train.steps": 20})
    run = dsc.train(build)
    run.losses
    print(dsc.load(run.folder).generate("def "))

They return frozen values. Errors in a spec are raised as one `SpecError` with every diagnostic; its `str` is what the
commands print. `changes` are keys and values as for `-s` on the command line. docs/python.md has more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.emit.folder import check_place, write_build
from compiler.predict.choose import ChosenSpec, choose, choose_phases, refusals_of
from compiler.predict.prediction import Prediction
from dsl import load as specs
from dsl.messages.diagnostics import Diagnostic, SpecError
from dsl.schema import Spec
from runtime.build.files import CACHE

if TYPE_CHECKING:
    from compiler.tools.inference.writing import TextWriter

__all__ = [
    "Compiled",
    "Loaded",
    "Planned",
    "RunError",
    "SpecError",
    "Trained",
    "check",
    "compile",
    "load",
    "plan",
    "train",
]

File = str | os.PathLike[str]
Changes = Mapping[str, object]


class RunError(RuntimeError):
    """Raised if a run fails. `code` is the exit code of `dsc train`."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        super().__init__(f"dsc train ended with exit code {code}\n{output}")


@dataclass(frozen=True)
class Planned:
    """A spec and the prediction of its run. `str` is the output of `dsc plan`."""

    spec: Spec
    prediction: Prediction

    def __str__(self) -> str:
        from compiler.tools.report.prediction_text import text  # with rich

        return text(self.prediction)


@dataclass(frozen=True)
class Compiled:
    """A build folder. `warning`: why the plan does not fit the devices; "" if it does."""

    folder: Path
    digest: str
    summary: str
    warning: str

    def __str__(self) -> str:
        return self.summary


@dataclass(frozen=True)
class Trained:
    """A run folder, and the rows of its metrics.jsonl (docs/json.md), one per step."""

    folder: Path
    metrics: tuple[Mapping[str, float], ...] = field(repr=False)

    @property
    def losses(self) -> tuple[float, ...]:
        """The mean loss of each step, in nats per token."""
        return tuple(row["loss"] for row in self.metrics if "loss" in row)


@dataclass(frozen=True)
class Loaded:
    """A trained model: the spec of its run, the step of its checkpoint, and its weights in this process.

    `writer.model` (compiler/tools/inference/language_model.py) returns hidden states, logits and losses of tokens;
    `writer.tokenizer` converts text to tokens.
    """

    spec: Spec
    step: int
    writer: TextWriter = field(repr=False)

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Generate the text that follows a prompt, at most `tokens` tokens. Temperature 0 takes the likeliest token.

        A prompt of messages, `[{"role": "user", "content": "…"}]`, is rendered with the model's chat template.
        """
        from compiler.tools.inference.generation import Sampler

        writer = self.writer
        begin = writer.prompt(prompt) if isinstance(prompt, str) else writer.reply_prompt({"messages": list(prompt)})
        return self.writer.write(begin, tokens, Sampler(temperature, top_p, seed)).text


def check(spec: File, changes: Changes | None = None) -> tuple[Diagnostic, ...]:
    """Return all diagnostics of a spec file, or of one run of it (`FILE:RUN`), without raising."""
    return specs.check(os.fspath(spec), None, _texts(changes))


def plan(spec: File, changes: Changes | None = None) -> Planned:
    """Predict a run: time, memory and cost of a step. Imports no torch. Raises SpecError."""
    from compiler.predict.predict import predict

    chosen = choose(os.fspath(spec), _texts(changes))
    return Planned(chosen.spec, predict(chosen.spec))


def compile(spec: File, changes: Changes | None = None, *, out: File | None = None) -> Compiled:
    """Compile a spec into a build folder, by default build/RUN. Raises SpecError, ProofError or OSError."""
    from compiler.emit.segment_cache import Segments
    from compiler.pipeline import compile_spec
    from compiler.plan.actions.order import Orders
    from compiler.tools.report.page import build_pages

    chosen = choose(os.fspath(spec), _texts(changes))
    _check_trains([chosen])
    folder = Path(out) if out is not None else Path("build") / chosen.spec.name
    check_place(folder)
    cache = folder / CACHE
    build = compile_spec(chosen.spec, segments=Segments(cache), orders=Orders(cache), pages=build_pages)
    write_build(folder, (*build.files, *((f"{CACHE}/{name}", text) for name, text in build.entries)))
    return Compiled(folder, build.digest, build.summary, build.warning)


def train(
    source: Compiled | File,
    changes: Changes | None = None,
    *,
    out: File | None = None,
    steps: int | None = None,
    resume: bool = False,
    data: File | None = None,
) -> Trained:
    """Train a build or a spec on the ranks of its plan, each in its own process. Their output is printed live.

    `out`: the run folder, by default runs/RUN. `steps`: stop after this many steps. `data`: the folder that a build's
    data paths are relative to, by default the current one. Raises SpecError, or RunError if the run fails.
    """
    from compiler.tools.processes import CapturedOutput
    from compiler.tools.training import Training, train_build, train_phases

    phases: list[ChosenSpec] = []
    if not isinstance(source, Compiled):
        phases = choose_phases(os.fspath(source), _texts(changes))
        _check_trains(phases)
    elif changes:
        raise ValueError("a build is compiled already: give changes to compile()")
    with CapturedOutput(print) as output:
        texts = tuple(_texts(changes))
        training = Training(_path(out), _path(data), steps, resume, changes=texts, output=output)
        if isinstance(source, Compiled):
            end = train_build(replace(training, expect=source.digest), source.folder)
        else:
            end = train_phases(training, phases)
    if end.code:
        raise RunError(end.code, "\n".join(output.lines[-20:]))
    rows = (end.run / "metrics.jsonl").read_text("utf-8").splitlines()
    return Trained(end.run, tuple(json.loads(row) for row in rows))


def load(run: Trained | File, *, dtype: str = "", average: bool = False) -> Loaded:
    """Load the model of a run, of RUN@STEP or of a checkpoint. Raises InferenceError, whose `hint` says what to do.

    `dtype`: fp64, fp32 or bf16, by default that of the run. `average`: load the moving average of the weights.
    """
    from compiler.tools.inference.sources import find_source
    from compiler.tools.inference.writing import open_writer

    source = find_source(os.fspath(run.folder if isinstance(run, Trained) else run))
    return Loaded(source.spec, source.checkpoint.step, open_writer(source, dtype, average=average))


def _check_trains(phases: Sequence[ChosenSpec]) -> None:
    """Raise SpecError with the reasons if a spec cannot be trained yet."""
    if refusals := [refusal for phase in phases for refusal in refusals_of(phase)]:
        raise SpecError(refusals)


def _path(name: File | None) -> Path | None:
    return None if name is None else Path(name)


def _texts(changes: Changes | None) -> list[str]:
    """Overrides as `-s` takes them, with true, false and none as a spec writes them."""
    words = {True: "true", False: "false", None: "none"}
    return [
        f"{key}={words[value] if value is None or isinstance(value, bool) else value}"
        for key, value in (changes or {}).items()
    ]

"""dsc from Python, as in a notebook: five functions over the code of the commands.

    import dsc_trainer as dsc

    dsc.check("specs/quickstart.dsc")                          # () if nothing is wrong
    print(dsc.plan("specs/deepseek-v3.dsc"))                   # time, memory and money, in seconds
    build = dsc.compile("specs/quickstart.dsc", {"train.steps": 20})
    run = dsc.train(build)
    run.losses
    print(dsc.load(run.folder).generate("def "))

They return frozen values. What is wrong with a spec is raised as `SpecError`, with every diagnostic; `str` of it is
what the commands print. `changes` are keys and values as of `-s` on the command line. docs/python.md has more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.emit.folder import check_place, write_build
from compiler.predict.choose import Chosen, choose, choose_phases, refusals_of
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
    """A run that did not come to its end; `code` is the exit code of `dsc train`."""

    def __init__(self, code: int, said: str) -> None:
        self.code = code
        super().__init__(f"dsc train ended with exit code {code}\n{said}")


@dataclass(frozen=True)
class Planned:
    """A spec and what its run takes; `str` is the page of `dsc plan`."""

    spec: Spec
    prediction: Prediction

    def __str__(self) -> str:
        from compiler.tools.report.prediction_text import text  # with rich

        return text(self.prediction)


@dataclass(frozen=True)
class Compiled:
    """A build folder. `warning`: where the plan does not fit the devices, or ""."""

    folder: Path
    digest: str
    summary: str
    warning: str

    def __str__(self) -> str:
        return self.summary


@dataclass(frozen=True)
class Trained:
    """A run folder, and the rows of its metrics.jsonl (docs/json.md), a row for each step."""

    folder: Path
    metrics: tuple[Mapping[str, float], ...] = field(repr=False)

    @property
    def losses(self) -> tuple[float, ...]:
        """The mean loss of each step, in nats for a token."""
        return tuple(row["loss"] for row in self.metrics if "loss" in row)


@dataclass(frozen=True)
class Loaded:
    """A trained model: the spec of its run, the step of its checkpoint, and its weights in this process.

    `writer.model` (compiler/tools/inference/language_model.py) gives hidden states, logits and losses of tokens;
    `writer.tokenizer` makes tokens of text.
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
        """The text that follows a prompt, of so many tokens at most. Temperature 0 takes the likeliest token.

        A prompt of messages, `[{"role": "user", "content": "…"}]`, goes through the model's chat template.
        """
        from compiler.tools.inference.generation import Sampler

        writer = self.writer
        begin = writer.prompt(prompt) if isinstance(prompt, str) else writer.reply_prompt({"messages": list(prompt)})
        return self.writer.write(begin, tokens, Sampler(temperature, top_p, seed)).text


def check(spec: File, changes: Changes | None = None) -> tuple[Diagnostic, ...]:
    """Everything that is wrong with a spec file, or with one run of it (`FILE:RUN`); nothing is raised for it."""
    return specs.check(os.fspath(spec), None, _texts(changes))


def plan(spec: File, changes: Changes | None = None) -> Planned:
    """What a run takes, before it runs: time, memory and money of a step. SpecError; imports no torch."""
    from compiler.predict.predict import predict

    chosen = choose(os.fspath(spec), _texts(changes))
    return Planned(chosen.spec, predict(chosen.spec))


def compile(spec: File, changes: Changes | None = None, *, out: File | None = None) -> Compiled:
    """Compile a spec into a build folder, by default build/RUN. SpecError, ProofError, OSError."""
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
    what: Compiled | File,
    changes: Changes | None = None,
    *,
    out: File | None = None,
    steps: int | None = None,
    resume: bool = False,
    data: File | None = None,
) -> Trained:
    """Train a build or a spec on the ranks of its plan, each in a process. Their lines are printed as they come.

    `out`: the run folder, by default runs/RUN. `steps`: train so many and stop. `data`: the folder that a build's data
    is relative to, by default the current one. SpecError; RunError if the run does not come to its end.
    """
    from compiler.tools.processes import Captured
    from compiler.tools.training import Training, train_build, train_phases

    phases: list[Chosen] = []
    if not isinstance(what, Compiled):
        phases = choose_phases(os.fspath(what), _texts(changes))
        _check_trains(phases)
    elif changes:
        raise ValueError("a build is compiled already: give changes to compile()")
    with Captured(print) as output:
        texts = tuple(_texts(changes))
        asked = Training(_path(out), _path(data), steps, resume, changes=texts, output=output)
        if isinstance(what, Compiled):
            end = train_build(replace(asked, expect=what.digest), what.folder)
        else:
            end = train_phases(asked, phases)
    if end.code:
        raise RunError(end.code, "\n".join(output.lines[-20:]))
    rows = (end.run / "metrics.jsonl").read_text("utf-8").splitlines()
    return Trained(end.run, tuple(json.loads(row) for row in rows))


def load(run: Trained | File, *, dtype: str = "", average: bool = False) -> Loaded:
    """The model of a run, RUN@STEP or a checkpoint. InferenceError, whose `hint` says what to do.

    `dtype`: fp64, fp32 or bf16, by default the run's own. `average`: take the moving average of the weights.
    """
    from compiler.tools.inference.sources import find_source
    from compiler.tools.inference.writing import open_writer

    source = find_source(os.fspath(run.folder if isinstance(run, Trained) else run))
    return Loaded(source.spec, source.checkpoint.step, open_writer(source, dtype, average=average))


def _check_trains(phases: Sequence[Chosen]) -> None:
    """Raise SpecError, which says why, for a spec that does not train yet."""
    if refusals := [refusal for each in phases for refusal in refusals_of(each)]:
        raise SpecError(refusals)


def _path(name: File | None) -> Path | None:
    return None if name is None else Path(name)


def _texts(changes: Changes | None) -> list[str]:
    """Overrides as `-s` takes them: true and false as a spec writes them."""
    shown = {True: "true", False: "false", None: "none"}
    return [
        f"{key}={shown[value] if value is None or isinstance(value, bool) else value}"
        for key, value in (changes or {}).items()
    ]

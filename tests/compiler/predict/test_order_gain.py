"""The saving that `dsc plan` predicts for `order = cost`, on a prepared text."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from compiler.cli.commands.plan import CACHE, samples_in
from compiler.cli.main import main
from compiler.emit.data_recipe import data_request
from compiler.pipeline import lower_spec
from compiler.predict.micro_batch_order import attention_share, costs_of_orders
from compiler.schedule.simulate import simulate
from dsl.load import load
from dsl.schema import Spec
from runtime.data.blended import prepare_data
from tests.compiler.cli.forms import parsed

QUICKSTART = Path(__file__).parents[3] / "specs" / "quickstart.dsc"
DATA = 'source = "text", tokenizer = train(270), validation = 0, documents = masked'


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    """A run on documents of lognormal lengths in the current folder; its text is prepared in the shared cache."""
    rng = random.Random(1)
    (tmp_path / "text").mkdir()
    for number in range(300):
        length = 1 + round(rng.lognormvariate(3.5, 1.2))
        words = " ".join(rng.choices(["stage", "rank", "step", "loss"], k=length))
        (tmp_path / "text" / f"{number}.txt").write_text(words, "utf-8")
    lines = QUICKSTART.read_text("utf-8").splitlines()
    lines = [f"  data {{ {DATA} }}" if line.startswith("  data {") else line for line in lines]
    text = "\n".join(lines).replace("schedule { name = dualpipe }", "schedule { name = 1f1b, order = cost }")
    (tmp_path / "run.dsc").write_text(text.replace("validate   {", "# validate {"), "utf-8")
    monkeypatch.chdir(tmp_path)
    run_spec = load(Path("run.dsc"))
    prepare_data(data_request(run_spec), tmp_path, tmp_path / "out", lambda *_: None, cache=CACHE)
    return run_spec


def order_in_plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """The entry for the order in the plan's JSON."""
    assert main(["plan", "run.dsc", "--format", "json"]) == 0
    return parsed(capsys.readouterr().out, "plan")["order"]


def mean_s(spec: Spec, text: Path, by_cost: bool) -> float:
    """The time of the first 8 steps, computed here independently: pair by pair, position by position."""
    lowered = lower_spec(spec)
    (schedule,) = (schedule for name, schedule in lowered.schedules.items() if name.startswith("train"))
    (order,) = lowered.micro_batch_orders.values()
    samples, share = samples_in(spec, text), attention_share(lowered.lowering)
    dp, size, sequence, batch = 2, 2, 128, 16
    times = []
    for step in range(8):
        pairs_of = {}
        for index in range(step * batch, (step + 1) * batch):
            starts = samples.starts(index)[:sequence].tolist()
            pairs_of[index] = sum(place - start + 1 for place, start in enumerate(starts))
        rows = [*pairs_of]
        if by_cost:
            ranked = sorted(rows, key=pairs_of.__getitem__)
            parts = [ranked[begin : begin + dp * size] for begin in range(0, batch, dp * size)]
            rows = [index for rank in order for index in parts[rank][:: -1 if rank % 2 else 1]]
        of_ranks = [sum(pairs_of[index] for index in rows[begin : begin + size]) for begin in range(0, batch, size)]
        # experts are on both data ranks
        dearest = [max(of_ranks[begin : begin + dp]) for begin in range(0, len(of_ranks), dp)]
        largest = size * sequence * (sequence + 1) / 2
        weights = [Fraction(round(1000 * (1 - share + share * pairs / largest)), 1000) for pairs in dearest]
        costs = replace(costs_of_orders(lowered.lowering), micro_batches=tuple(weights))
        times.append(float(simulate(schedule, costs).makespan) / 1000)
    return mean(times)


def test_the_saving_is_computed_from_the_steps_of_a_run(spec: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    gain = order_in_plan(capsys)
    text = Path(gain["data"])
    assert gain["drawn_s"] == pytest.approx(mean_s(spec, text, False), rel=1e-9)
    assert gain["ordered_s"] == pytest.approx(mean_s(spec, text, True), rel=1e-9)
    assert gain["saved"] == pytest.approx(1 - gain["ordered_s"] / gain["drawn_s"]) and gain["saved"] > 0
    assert gain["steps"] == 8 and text.parent == CACHE
    assert main(["plan", "run.dsc", "--width", "120"]) == 0
    output = capsys.readouterr().out
    assert f"saves {gain['saved']:.1%}" in output and "1f1b with micro-batches by cost" in output


def test_no_saving_is_given_for_a_changed_or_missing_text(spec: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    with (Path("text") / "0.txt").open("a", encoding="utf-8") as file:
        file.write("another word")
    assert order_in_plan(capsys) is None
    CACHE.rename("elsewhere")
    assert order_in_plan(capsys) is None

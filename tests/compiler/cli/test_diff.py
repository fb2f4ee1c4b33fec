"""`dsc diff` lists exactly the differences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.cli.main import main
from compiler.ir import Use
from compiler.plan.plan import make_plan
from compiler.schedule import SCHEDULES
from compiler.tools.difference import difference
from dsl.closed_forms.counts import parameters
from dsl.closed_forms.memory import lower_bound
from dsl.load import load, resolve
from dsl.resolve.chosen import runs_in
from dsl.schema import Spec
from tests.compiler.cli.forms import parsed

ROOT = Path(__file__).parents[3]
SPECS = sorted((ROOT / "specs").glob("*.dsc"))
QUICK = str(ROOT / "specs" / "quickstart.dsc")
Captured = pytest.CaptureFixture[str]

# Valid overrides of quickstart.dsc: path → values that differ from its own.
SINGLE = {
    "train.seed": ("2", "77"),
    "train.micro_batch": ("1",),
    "train.optimizer.beta1": ("0.5", "0.8"),
    "train.optimizer.eps": ("1e-6",),
    "train.checkpoint.keep": ("1", "4"),
    "train.checkpoint.every": ("7",),
    "parallel.zero": ("1",),
    "parallel.expert": ("1",),
    "schedule.name": ("1f1b",),
    "recompute": ("[rmsnorm]",),
    "unfused": ("[residual_norm]", "[route, join]"),
    "data.validation": ("10%",),
    "data.source": ('"corpus/*.txt"',),
    "model.hidden": ("64", "200"),
    "model.norm_eps": ("1e-5",),
    "model.attention.heads": ("2", "8"),
    "model.attention.rope.theta": ("500_000",),
    "model.mtp.weight": ("0.1", "0.3 until 1M tokens then 0.1"),
    "cluster.node.device.memory": ("8GB", "3GiB"),
    "cluster.node.nvlink": ("200GB/s",),
}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_spec_does_not_differ_from_itself(path: Path, tmp_path: Path, capsys: Captured) -> None:
    run = f"{path}:{runs_in(path)[0]}"
    assert main(["diff", run, run]) == 0 and capsys.readouterr().out == "no difference\n"
    assert main(["show", run]) == 0
    (tmp_path / "shown.dsc").write_text(capsys.readouterr().out, "utf-8")
    assert main(["diff", run, str(tmp_path / "shown.dsc"), "--format", "json"]) == 0  # in other words, in one file
    document = parsed(capsys.readouterr().out, "diff")
    assert document["equal"] and not document["values"] and not document["facts"] and not document["moves"]


@pytest.mark.parametrize(("path", "text"), [(path, text) for path, texts in SINGLE.items() for text in texts])
def test_one_change_is_reported_as_one_path(path: str, text: str) -> None:
    before, after = resolve(QUICK), resolve(QUICK, overrides=[f"{path}={text}"])
    forward = difference(before, after)
    assert [change.path for change in forward.values if not change.derived] == [path]
    assert {change.path for change in forward.values if change.derived} <= {"parallel.data", "train.tokens"}
    back = difference(after, before)
    assert {(c.path, c.after, c.before) for c in back.values} == {(c.path, c.before, c.after) for c in forward.values}
    assert {(f.name, f.after, f.before) for f in back.facts} == {(f.name, f.before, f.after) for f in forward.facts}


BLOCKS = {  # in moe-8gpu.dsc, whose device has SMs
    "model": "model.norm_eps=1e-5",
    "cluster": "cluster.node.device.memory=90GB",
    "precision": "precision=fp32",
    "recompute": "recompute=[layer]",
    "recompute_layers": "recompute_layers=2",
    "unfused": "unfused=[join]",
    "offload": "offload=[moments]",
    "parallel": "parallel.zero=0",
    "schedule": "schedule.name=gpipe",
    "sm": "sm.communication=2",
    "train": "train.seed=2",
    "data": "data.validation=10%",
    "kernels": "kernels.grouped_products=triton",
    "stack": "stack.launches=eager",
    "metrics": "metrics.tensorboard=true",
}


def test_any_block_of_a_run_may_differ() -> None:
    """All at once, which are in the order of the schema."""
    path = str(ROOT / "specs" / "moe-8gpu.dsc")
    diff = difference(resolve(path), resolve(path, overrides=list(BLOCKS.values())))
    blocks = dict.fromkeys(change.path.split(".")[0] for change in diff.values)
    absent = ("name", "adapter")  # an override cannot add a block with a kind
    assert list(blocks) == [name for name in Spec.model_fields if name not in absent]


@settings(max_examples=25)
@given(st.sets(st.sampled_from(sorted(SINGLE)), min_size=2, max_size=5))
def test_changes_add_up(paths: set[str]) -> None:
    overrides = [f"{path}={SINGLE[path][0]}" for path in sorted(paths - {"schedule.name", "train.micro_batch"})]
    diff = difference(resolve(QUICK), resolve(QUICK, overrides=overrides))
    assert {change.path for change in diff.values if not change.derived} == paths - {
        "schedule.name",
        "train.micro_batch",
    }


def test_derived_facts_match_the_specs() -> None:
    overrides = ["parallel.pipeline=4", "parallel.expert=1", "model.hidden=256"]
    before, after = resolve(QUICK), resolve(QUICK, overrides=overrides)
    diff = difference(before, after)
    facts = {fact.name: (fact.before, fact.after) for fact in diff.facts}
    for name, value_of in (("parameters.total", lambda spec: parameters(spec.model).total),
                     ("memory.total", lambda spec: lower_bound(spec).total)):  # fmt: skip
        assert facts[name] == (value_of(before.spec), value_of(after.spec))
    assert facts["schedule.stages"] == (2, 4) and facts["schedule.micro_batches"] == (4, 8)
    # (P/2 - 1)(F&B + B - 3W) of N(F + B) and that: arXiv 2412.19437, table 2, with F = I = W = 1 and B = 2
    assert facts["schedule.bubble"] == (0.0, pytest.approx(2 / 26, abs=1e-6))
    stages: list[dict[int, int]] = [{}, {}]
    for table, spec in zip(stages, (before.spec, after.spec), strict=True):
        for stage in make_plan(spec).stages:
            for use in stage.steps:
                match = re.match(r"L(\d+)\.", use.site) if isinstance(use, Use) else None
                if match:
                    table[int(match[1])] = stage.index
    moved = {layer: (move.before, move.after) for move in diff.moves for layer in range(move.first, move.last + 1)}
    assert moved == {
        layer: (stages[0][layer], stages[1][layer]) for layer in stages[0] if stages[0][layer] != stages[1][layer]
    }


@pytest.fixture
def layered(tmp_path: Path) -> Path:
    """quickstart.dsc with other layers: one more dense, wider experts, and one layer more."""
    text = Path(QUICK).read_text("utf-8")
    text = text.replace("layers 0..0", "layers 0..1").replace("layers 1..3", "layers 2..4")
    text = re.sub(r"inner = 128\b", "inner = 256", text)
    (tmp_path / "other.dsc").write_text(text, "utf-8")
    return tmp_path / "other.dsc"


def test_layers_are_compared_one_by_one(layered: Path) -> None:
    diff = difference(resolve(QUICK), resolve(layered))
    assert [(change.path, change.before, change.after) for change in diff.values] == [
        ("model.layers.1.ffn", "moe 16 x 128", "dense 512"),
        ("model.layers.2..3.ffn.inner", "128", "256"),
        ("model.layers.4", None, "moe 16 x 256"),
    ]
    facts = {fact.name: (fact.before, fact.after) for fact in diff.facts}
    assert facts["layers.dense"] == (1, 2) and "layers.moe" not in facts


def test_names_order_and_splitting_of_ranges_are_no_difference(tmp_path: Path, capsys: Captured) -> None:
    text = Path(QUICK).read_text("utf-8")
    run, model, cluster = re.split(r"\n(?=model |cluster )", text)
    model = re.sub(r"( +layers) 1\.\.3 (\{.*?\n  \})", r"\1 1..1 \2\n\1 2..3 \2", model, flags=re.S)
    assert model.count("ffn moe") == 2
    text = "\n".join((cluster, model, run))
    text = re.sub(r"(model +(?:= )?)quick\b", r"\1renamed", text).replace("device cpu", "device x")
    text = re.sub(r"run quickstart", "run other", re.sub(r"#.*", "", text))
    (tmp_path / "a.dsc").write_text(text, "utf-8")
    assert load(tmp_path / "a.dsc") != load(QUICK)
    assert main(["diff", QUICK, str(tmp_path / "a.dsc")]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_text(layered: Path, capsys: Captured, bless: bool) -> None:
    """Golden text output."""
    golden = Path(__file__).parent / "golden" / "diff.txt"
    assert main(["diff", QUICK, str(layered), "-s", "parallel.pipeline=4", "-s", "parallel.expert=1"]) == 1
    text = capsys.readouterr().out
    if bless:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, "utf-8")
    assert text == golden.read_text("utf-8")


def test_exit_codes(tmp_path: Path, capsys: Captured) -> None:
    assert main(["diff", QUICK]) == 2
    assert "parallel.pipeline=8" in capsys.readouterr().err
    assert main(["diff", QUICK, "-s", "train.seed=1"]) == 0
    assert main(["diff", QUICK, "-s", "train.seed=2"]) == 1
    (tmp_path / "a.dsc").write_text("run a { }\n", "utf-8")
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a.dsc"), str(tmp_path / "none.dsc")]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and "error[E0203]" in stderr and "error[E0101]" in stderr  # of both


def test_a_schedule_that_is_searched_for_is_compared_without_its_bubble(capsys: Captured) -> None:
    assert main(["diff", QUICK, "-s", "schedule.name=auto", "--format", "json"]) == 1
    facts = {fact["name"]: fact for fact in parsed(capsys.readouterr().out, "diff")["facts"]}
    assert facts["schedule.bubble"]["after"] is None


PHASED = """
import "tiny.dsc"
run mine extends tiny {
  phase long { train { sequence = 32, steps = 4 } }
  phase last { train { sequence = 64, steps = 4 } }
}
"""


def test_runs_are_compared_phase_by_phase(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "tiny.dsc").write_text((ROOT / "specs" / "tiny.dsc").read_text("utf-8"), "utf-8")
    old, new = tmp_path / "old.dsc", tmp_path / "new.dsc"
    old.write_text(PHASED, "utf-8")
    assert main(["diff", str(old), str(old)]) == 0 and capsys.readouterr().out == "no difference\n"
    changed = PHASED.replace("sequence = 64, steps = 4", "sequence = 64, steps = 6").replace("phase long", "phase two")
    new.write_text(changed, "utf-8")
    assert main(["diff", str(old), str(new)]) == 1
    stdout = capsys.readouterr().out
    assert stdout.startswith("phase last\n\ntrain\n") and "1024 tokens → 1536 tokens" in stdout
    assert f"phase long: only in {old}\n\nphase two: only in {new}\n" in stdout and "first phase" not in stdout
    assert main(["diff", f"{old}:mine.last", f"{new}:mine.last", "-s", "phase.last.train.steps=4"]) == 0
    assert main(["diff", str(old), "-s", "phase.long.train.batch=8", "--format", "json"]) == 1
    document = parsed(capsys.readouterr().out.partition("\n")[2], "diff_phases")
    assert [phase["equal"] for phase in document["phases"]][1] is False and not document["only_after"]


def test_a_run_without_phases_is_compared_with_the_first_phase(tmp_path: Path, capsys: Captured) -> None:
    tiny, phased = tmp_path / "tiny.dsc", tmp_path / "phased.dsc"
    tiny.write_text((ROOT / "specs" / "tiny.dsc").read_text("utf-8"), "utf-8")
    phased.write_text(PHASED, "utf-8")
    other_phases = f"the others are {phased}:mine.long, {phased}:mine.last\n"
    for words in ((str(phased), str(tiny)), (str(tiny), str(phased), "-s", "train.seed=2")):
        main(["diff", *words])
        assert capsys.readouterr().err == f"note: this is the first phase of mine; {other_phases}"
    main(["diff", f"{phased}:mine.last", str(tiny)])
    assert capsys.readouterr().err == "", "that one was named"


@pytest.mark.parametrize(("tokens", "sizes", "steps"), [(64, 1, 2), (65, 2, 3), (224, 3, 4), (225, 4, 5), (900, 4, 10)])
def test_counts_only_batch_sizes_that_a_run_reaches(tokens: int, sizes: int, steps: int, tmp_path: Path) -> None:
    """The batch has 2, 4, 6 and then 8 sequences of 16 tokens; it grows after each third of 192 tokens."""
    text = (ROOT / "specs" / "tiny.dsc").read_text("utf-8")
    text = text.replace("batch       = 4", "batch { from = 2, to = 8, over = 192 tokens }")
    (tmp_path / "grows.dsc").write_text(text.replace("steps       = 5", f"tokens = {tokens}"), "utf-8")
    diff = difference(resolve(ROOT / "specs" / "tiny.dsc"), resolve(tmp_path / "grows.dsc"))
    facts = {fact.name: fact.after for fact in diff.facts}
    assert (facts.get("schedule.batch_sizes", 1), facts.get("schedule.steps", 5)) == (sizes, steps)


def test_orders_of_two_files_are_compared(tmp_path: Path, capsys: Captured) -> None:
    text = Path(QUICK).read_text("utf-8").replace("name = dualpipe", 'file = "mine.schedule"')
    for name, schedule in (("one", "zb1p"), ("same", "zb1p"), ("other", "1f1b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.dsc").write_text(text, "utf-8")
        (tmp_path / name / "mine.schedule").write_text(SCHEDULES[schedule].generate(2, 4).to_text(), "utf-8")
    first, equal, different = (str(tmp_path / name / "spec.dsc") for name in ("one", "same", "other"))
    assert main(["diff", first, equal]) == 0 and capsys.readouterr().out == "no difference\n"
    assert main(["diff", first, different, "--format", "json"]) == 1
    (change,) = parsed(capsys.readouterr().out, "diff")["values"]
    assert (change["path"], change["before"], change["after"]) == (
        "schedule.actions",
        "zb1p, 24 steps",
        "1f1b, 16 steps",
    )

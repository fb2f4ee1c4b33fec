"""docs/performance.md shows the measurements, and lists what was not measured."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.__main__ import disagree, processor, updated
from benchmarks.speed.arena import Record
from benchmarks.speed.contests import CONTESTS, PRECISIONS, builds_of, chosen
from benchmarks.speed.page import PAGE, best, figures, file_of, page, results, table
from compiler.cli.commands.common import is_refused, load_spec
from dsl.load import resolve

ROOT = Path(__file__).parents[2]


def row(name: str, group: str, seconds: float, processor_s: float, processes: int = 1, **more: Any) -> dict[str, Any]:
    """A row of three rounds of two steps; one round was disturbed."""
    rounds = [[2 * s, 2 * processor_s] for s in (seconds, seconds, 9.0)]
    return {
        "name": name,
        "title": more.pop("title", f"the {name} | one"),
        "group": group,
        "processes": processes,
        "threads": 1,
        "steps": 2,
        "info": {},
        "losses": [8.5, 8.25],
        "rounds": rounds,
        "peak_bytes": 500_000_000,
        "idle_processor_s": 0.0,
        "failed": "",
        **more,
    }


def contest() -> dict[str, Any]:
    return {
        "name": "bench-4 fp32",
        "title": "4 layers, FP32",
        "spec": "specs/bench-4.dsc",
        "precision": "fp32",
        "tokens": 1000,
        "product_flops": 90_000_000_000,
        "attention_flops": 10_000_000_000,
        "rows": [
            row("limit", "limit", 0.9, 0.9),  # products take 0.9 s, so the limit of a step is 1 s: 1000 tokens/s
            row("alone", "ours", 1.25, 1.25),
            row("both", "ours", 0.8, 1.6, processes=2, title="data parallel | both"),
            row("pipe", "ours", 1.0, 1.7, processes=2, title="DualPipe P = 2"),
            row("hf", "theirs", 1.6, 3.2, processes=2, info={"choice": {"attention": "eager"}}),
            row("hf 1", "theirs", 2.0, 2.0),
            row("late", "theirs", 0.1, 0.1, failed="not measured: error[E1001]: a | b\nmore", rounds=[]),
        ],
    }


def found() -> dict[str, Any]:
    return {
        "date": "2000-01-02",
        "processor": "A Processor",
        "cores": 2,
        "memory_bytes": 16 << 30,
        "versions": {"torch": "1.0"},
        "rounds": 3,
        "contests": [contest()],
    }


def test_the_page_is_current(bless: bool) -> None:
    text = page(results())
    if bless:
        PAGE.write_text(text, "utf-8")
    assert PAGE.read_text("utf-8") == text, "run: python -m benchmarks.speed --page"


def test_a_row_shows_medians_ratios_and_shares() -> None:
    text = table(contest())
    assert "Limit: 1,000 tokens/s per core." in text and "100 GFLOP/s" in text
    cells = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    expected = "| **dsc**, data parallel | both | 2 × 1 | 1,250 | 2.00 | 625 | 1,600 | 62% | 500 MB |"
    assert expected in text and len(cells) > 5
    assert "| **dsc**, the alone | one | 1 × 1 | 800 | 1.28 | 800 | 1,250 | 80% | 500 MB |" in text
    assert "| the late | one | 1 × 1 | not measured: error[E1001]: a \\| b | | | | | |" in text
    assert "| plain PyTorch | 1 × " in text and "| not measured | | | | | |" in text, "a row that these results lack"


def test_results_have_the_options_of_the_others() -> None:
    """The page says that the results contain them."""
    rows = [row for machine in results() for contest in machine["contests"] for row in contest["rows"]]
    assert all(row["info"].get("choice") for row in rows if row["group"] == "theirs" and not row["failed"])


def test_goals_compare_the_best_rows() -> None:
    goals = dict(re.findall(r"^\| (FP32|BF16|4 ranks|`fp8_block`)(.*?) \|", page([found()]), re.MULTILINE))
    assert set(goals) == {"FP32", "BF16", "4 ranks", "`fp8_block`"}
    lines = page([found()]).splitlines()
    assert "| FP32, 2 ranks, against their best | ≥ 1.60 | 2.00 |" in lines
    assert "| FP32, 2 ranks, of the limit | ≥ 75% | 62%, not reached |" in lines
    assert "| FP32, DualPipe P = 2, against their best | ≥ 1.20 | 1.60 |" in lines
    assert "| FP32, DualPipe P = 2, against data parallel | ≥ 0.95 | 0.80, not reached |" in lines
    assert "| FP32, one thread, by processor time | ≥ 1.50 | 1.60 |" in lines
    assert "| BF16, 2 ranks, against their best | ≥ 2.40 | not measured |" in lines
    for step_s, shown in ((1.2, "83%"), (1.26, "79%, not reached"), (1.2205, "82%, not reached")):
        other = found()  # of its last step, 81.9%: nothing is reached by rounding
        other["contests"][0]["rows"][1]["rounds"] = [[2 * step_s, 2 * step_s]] * 3
        assert f"| FP32, one thread, of the limit | ≥ 82% | {shown} |" in page([other])


def test_goals_cover_all_machines_and_tables_the_newest() -> None:
    second_machine = {**found(), "processor": "Another", "contests": [precisions()]}
    text = page([found(), second_machine])
    assert "| | goal | A Processor | Another |" in text
    assert "| FP32, 2 ranks, against their best | ≥ 1.60 | 2.00 | not measured |" in text
    assert "| `fp8_block`, 4 ranks, against FP32 | ≥ 0.40 | not measured | 0.33, not reached |" in text
    assert "The tables below are of A Processor." in text and "## Precisions" not in text


def test_results_are_by_kind_of_processor() -> None:
    cpuinfo = "processor\t: 0\ncpu family\t: 25\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n"
    assert processor(cpuinfo) == "AMD EPYC, family 25"
    assert file_of(processor(cpuinfo)).name == "amd-epyc-family-25.json"
    assert processor("model name : Thing (R) 3\n") == "Thing (R) 3"


def precisions() -> dict[str, Any]:
    rows = [
        row("fp32 on 1", "ours", 1.0, 1.0, title="fp32"),
        row("fp8_block on 1", "ours", 5.0, 2.5, title="fp8_block"),
        row("nvfp4 on 1", "ours", 1.0, 1.0, title="nvfp4", failed="round 1: hung", rounds=[]),
        row("fp32 on 4", "ours", 0.5, 2.0, processes=4, title="fp32"),
        row("fp8_block on 4", "ours", 1.5, 1.0, processes=4, title="fp8_block"),
    ]
    flops = {"product_flops": 0, "attention_flops": 0}
    return {**contest(), **flops, "name": "precisions", "title": "Precisions", "precision": "each", "rows": rows}


def test_precisions_are_compared_with_fp32_in_the_same_layout() -> None:
    """One thread by the processor's time, ranks by the clock."""
    text = page([{**found(), "contests": [precisions()]}])
    assert "| `fp32` | 1,000 | 1.00 | 2,000 | 1.00 | 500 MB |" in text
    assert "| `fp8_block` | 400 | 0.40 | 667 | 0.33 | 500 MB |" in text
    assert "| `nvfp4` | round 1: hung | | | | |" in text
    assert "| `fp8_block`, one thread, against FP32, by processor time | ≥ 0.40 | 0.40 |" in text
    assert "| `fp8_block`, 4 ranks, against FP32 | ≥ 0.40 | 0.33, not reached |" in text


def test_a_part_is_put_into_results_of_the_same_machine() -> None:
    before, part = found(), {**found(), "date": "2000-01-03", "contests": [precisions()]}
    assert updated(before, part) == {**before, "contests": [contest(), precisions()]}
    second_part = {**part, "contests": [{**contest(), "title": "again"}]}
    assert [c["title"] for c in updated(updated(before, part), second_part)["contests"]] == ["again", "Precisions"]
    with pytest.raises(SystemExit, match="another machine"):
        updated(before, {**part, "cores": 4})


def test_without_a_limit_or_others_there_are_no_shares() -> None:
    alone = copy.deepcopy(contest())
    alone["rows"] = [row("both", "ours", 0.8, 1.6, processes=2)]
    assert best(figures(alone).values(), "theirs") is None
    assert "nan" not in table(alone)


def test_a_contestant_with_other_losses_fails() -> None:
    losses = {"limit": None, "a": 8.5, "b": 8.5004, "c": 8.502, "d": math.nan}
    records = {name: Record(1, losses=[loss]) for name, loss in losses.items()}
    disagree(records, 1e-3)
    assert [name for name, record in records.items() if record.failed] == ["c", "d"]
    assert "8.5020" in records["c"].failed


def test_names_of_contests_and_rows_are_unique() -> None:
    assert len({c.name for c in CONTESTS}) == len(CONTESTS)
    for contest in CONTESTS:
        names = [r.name for r in contest.rows]
        assert len(set(names)) == len(names)
        assert [r.group for r in contest.rows].count("limit") == 1
        assert any(r.group == "theirs" for r in contest.rows)


def test_contests_are_selected_by_words() -> None:
    assert chosen(False, []) == [*CONTESTS, PRECISIONS] and chosen(False, ["prec"]) == [PRECISIONS]
    assert chosen(True, ["prec"]) == [PRECISIONS], "no row of it is a quick one"


@pytest.mark.parametrize("each", [c for c in (*CONTESTS, PRECISIONS) if c.precision != "bf16"], ids=lambda c: c.name)
def test_layouts_use_the_ranks_that_their_rows_state(each: Any) -> None:
    """All layouts can be trained, on the ranks that the row states, with the same batch."""
    processes = {r.name: r.processes for r in each.rows} | {"start": 1}
    for name, overrides in builds_of(each).items():
        chosen = load_spec(str(ROOT / each.spec), list(overrides))
        assert chosen is not None and not is_refused(chosen), name
        parallel, spec = chosen.spec.parallel, resolve(ROOT / each.spec).spec
        assert parallel.pipeline * parallel.data == processes[name], name
        assert chosen.spec.train.batch == spec.train.batch and chosen.spec.model == spec.model

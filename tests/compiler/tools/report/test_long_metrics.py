"""A page of a long run reads some rows, and shows the curves, sums and phases of all rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from compiler.files import native
from compiler.tools.report import long_metrics
from compiler.tools.report.charts import PANELS, column
from compiler.tools.report.long_metrics import COLUMNS, LEFT_OUT, Row, drawn_rows, left_out, step_rows, typical
from compiler.tools.report.lost_time import lost_time, seconds_of_row
from compiler.tools.report.summary import PARTS, seconds_of_parts

STEPS, PARTS_OF_FILE = 4000, 16
ODD = (b'{"step": 7, "loss"', b"", b"[1]", b'{"step": 1.0}', b'{"step": true}', b'{"step": 5, "a": "\\n", "loss": NaN}')


def run_of(path: Path, odd: bool) -> None:
    """Rows of two phases with spikes and values that are missing or no numbers; `odd`: also lines that C declines."""
    draw = random.Random(3)
    lines = list[bytes]()
    for step in range(1, STEPS + 1):
        row: dict[str, Any] = {
            "step": step,
            "time": f"2026-01-31T{step // 3600:02}:{step // 60 % 60:02}:{step % 60:02}Z",
        }
        row |= {"loss": draw.gauss(4, 1) if draw.random() > 0.01 else None, "grad_norm": draw.expovariate(1) ** 3}
        row |= {"rate": 1e-3 / step, "tokens_per_s": draw.gauss(5000, 300), "step_s": draw.expovariate(2)}
        row |= {"layer_imbalance": {"layers.1": 1.5}, "spent_s": {"compute": draw.random(), "sum": draw.random() / 9}}
        row |= {"phase": 1 if step < 1234 else 2, "memory_bytes": draw.randrange(10**9), "sequence_loss": -1e-300}
        row |= {"validation_loss": draw.random() * 1e22} if step % 100 == 0 else {}
        lines.append(json.dumps(row).encode())
        if odd and draw.random() < 0.003:
            lines.append(draw.choice(ODD))
    path.write_bytes(b"\n".join(lines) + b'\n{"step": 9')


@pytest.fixture(params=["C", "C, odd lines", "Python, odd lines"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large."""
    monkeypatch.setattr(long_metrics, "WHOLE_BYTES", 0)
    monkeypatch.setattr(long_metrics, "PARTS", PARTS_OF_FILE)
    monkeypatch.setattr(long_metrics, "TAIL_BYTES", 10_000)
    if request.param.startswith("Python"):
        monkeypatch.setattr(native, "loaded", lambda _: None)
    run_of(tmp_path / "metrics.jsonl", "odd" in request.param)
    return tmp_path / "metrics.jsonl"


def test_curves_have_their_extremes(path: Path) -> None:
    everything, drawn = step_rows(path), drawn_rows(path)
    assert drawn.damaged == everything.damaged
    assert len(drawn.rows) < len(everything.rows) / 4
    rows = {row["step"]: row for row in everything.rows}
    assert all({**row, LEFT_OUT: 0} == {**rows[row["step"]], LEFT_OUT: 0} for row in drawn.rows)
    for key in ("loss", "validation_loss", "memory_bytes", *(key for key, _, _ in PANELS)):
        ours, theirs = column(drawn.rows, key), column(everything.rows, key)
        assert bool(ours) == bool(theirs)
        for extreme in (min, max):
            assert not theirs or extreme(v for _, v in ours) == extreme(v for _, v in theirs), key
    assert drawn.rows[-20:] == everything.rows[-20:] and drawn.rows[0] == everything.rows[0]


def test_sums_are_those_of_all_rows(path: Path) -> None:
    everything, drawn = step_rows(path).rows, drawn_rows(path).rows
    assert sum(1 + left_out(row).get("rows", 0) for row in drawn) == len(everything)
    assert sum(map(seconds_of_row, drawn)) == pytest.approx(sum(row.get("step_s", 0.0) for row in everything))
    assert seconds_of_parts(drawn) == pytest.approx(seconds_of_parts(everything))
    lost, expected = lost_time(drawn, (), ()), lost_time(everything, (), ())
    assert lost is not None and expected is not None
    assert (lost.wall, lost.steps) == pytest.approx((expected.wall, expected.steps))


def test_medians_are_of_rows_that_were_not_chosen_for_their_values(path: Path) -> None:
    drawn = drawn_rows(path).rows
    assert 0 < len(typical(drawn)) <= PARTS_OF_FILE
    assert typical(step_rows(path).rows) == step_rows(path).rows


def test_no_row_is_left_out_where_phases_change_or_ranks_start(path: Path) -> None:
    def steps_near(rows: tuple[Row, ...], step: int) -> list[int]:
        return [row["step"] for row in rows if abs(row["step"] - step) <= 3]

    for rows, step in ((drawn_rows(path).rows, 1234), (drawn_rows(path, {2222}).rows, 2222)):
        assert steps_near(rows, step) == steps_near(step_rows(path).rows, step)


def test_c_and_python_find_the_same_rows(path: Path) -> None:
    data = b"".join(line + b"\n" for line in path.read_bytes().split(b"\n")[:-1] if line not in ODD)
    found, (expected, damaged) = long_metrics._extremes_in_c(data), long_metrics._extremes_in_python(data)
    assert damaged == 0
    if found is not None:  # else there is no C
        assert (found.num_rows, found.places) == (expected.num_rows, expected.places)
        assert found.bounds == pytest.approx(expected.bounds) and found.sums == pytest.approx(expected.sums)


@pytest.mark.parametrize(
    "line", [*ODD[:1], *ODD[2:], b'{"step": 1, "x": 01}', b'{"step": 1,}', b'{"step": 1} x', b"{}"]
)
def test_c_declines_what_only_python_reads(line: bytes) -> None:
    assert long_metrics._extremes_in_c(line + b"\n") is None
    assert long_metrics._extremes_in_c(b'{"step": 1}\n' + line) is None


def test_every_drawn_column_is_searched() -> None:
    assert {key for key, _, _ in PANELS} <= {*COLUMNS}
    assert {part for part, *_ in PARTS} - {"lost"} == {name.partition(".")[2] for name in COLUMNS if "." in name}

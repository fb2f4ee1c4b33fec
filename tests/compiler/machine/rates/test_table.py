"""Rate tables: the shipped ones, and the messages for files that are not rate tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from compiler.machine.rates import RateError, read_table, shipped_table, shipped_table_names
from compiler.machine.rates.table import (
    FLOPS,
    LINKS,
    MAX_BYTES,
    MAX_ROWS,
    SECONDS,
    TABLES,
    Point,
    RateTable,
    parse_model,
    rate_at,
    table_of_json,
)
from compiler.predict import interval

ROW = {"class": "copy", "rate": 1e12, "source": "a note", "date": "2025-01"}
TABLE = {"name": "mine", "device": {"name": "a device"}, "rows": [ROW]}


def text(**changes: object) -> str:
    return json.dumps(TABLE | changes)


@pytest.mark.parametrize("name", shipped_table_names())
def test_shipped_tables_are_written_as_they_are_read(name: str) -> None:
    written = (TABLES / f"{name}.json").read_text("utf-8")
    assert parse_model(RateTable, written, name).to_json() == written
    assert shipped_table(name).name == name


def test_shipped_tables_are_listed_by_name() -> None:
    assert list(shipped_table_names()) == sorted(path.stem for path in TABLES.glob("*.json"))


@pytest.mark.parametrize("name", shipped_table_names())
def test_rates_of_gpus_state_their_number_of_sms(name: str) -> None:
    table = shipped_table(name)
    assert table.rows
    if table.device.sms:
        assert all(row.sms for row in table.rows if row.kind in FLOPS)


def test_a_table_scales_the_rows_of_its_base_to_its_peaks() -> None:
    h800, h200 = shipped_table("h800"), shipped_table("h200")
    assert h200.device.hbm == 4.8e12 and h200.device.sms == 132

    def rates(table: RateTable, kind: str) -> dict[tuple[int, ...], float]:
        return {row.shape: row.rate for row in table.rows if row.kind == kind and row.rate and row.dtype != "bf16"}

    assert rates(h200, "gemm") == rates(h800, "gemm")
    assert rates(h200, "norm")[()] == pytest.approx(rates(h800, "norm")[()] * 4.8 / 3.35)
    assert rates(h200, "message_node")[()] == pytest.approx(160e9 * 450 / 200)
    assert rates(h200, "copy") == {(): 4.3e12}
    assert len(rates(h200, "grouped_wgrad")) == 5 and max(rates(h200, "grouped_wgrad").values()) < 900e12


def test_a_factor_overrides_that_of_the_base() -> None:
    base, factor = shipped_table("h800-calibrated"), {"class": "gemm", "dtype": "e4m3", "factor": 2.0}
    assert base.factor_of("gemm", "e4m3") not in (1.0, 2.0)
    factors = [factor | {"source": "a note", "date": "2025-01"}]
    mine = table_of_json(text(base=base.name, rows=[], factors=factors), "t.json")
    assert mine.factor_of("gemm", "e4m3") == 2.0
    assert mine.factor_of("wgrad", "e4m3") == base.factor_of("wgrad", "e4m3")


def test_a_text_is_a_table() -> None:
    table = table_of_json(text(), "t.json")
    assert [row.rate for row in table.rows] == [1e12] and table_of_json(table.to_json(), "t.json") == table


WRONG = {
    "no class": (text(rows=[ROW | {"class": "gem"}]), "t.json: rows[0]: there is no class 'gem': use gemm"),
    "no rate": (text(rows=[{k: v for k, v in ROW.items() if k != "rate"}]), "rows[0]: a row of class copy has `rate`"),
    "seconds of a rate": (text(rows=[ROW | {"seconds": 1.0}]), "has `rate`, not `seconds`"),
    "rate of seconds": (text(rows=[ROW | {"class": "launch"}]), "has `seconds`, not `rate`"),
    "shape": (text(rows=[ROW | {"class": "gemm", "shape": [1, 2]}]), "the shape of class gemm has 0 or 3 extents"),
    "extent": (text(rows=[ROW | {"shape": [0, 2]}]), "rows[0].shape[0]"),
    "text for a number": (text(rows=[ROW | {"rate": "1e12"}]), "rows[0].rate: input should be a valid number"),
    "negative": (text(rows=[ROW | {"rate": -1.0}]), "rows[0].rate: input should be greater than or equal to 1"),
    "unknown key": (text(rows=[ROW | {"rates": 1.0}]), "rows[0].rates: extra inputs are not permitted"),
    "no source": (text(rows=[{k: v for k, v in ROW.items() if k != "source"}]), "rows[0].source: field required"),
    "date": (text(rows=[ROW | {"date": "last May"}]), "rows[0].date"),
    "base": (text(base="h900"), "there is no table 'h900'"),
    "twice": (
        text(factors=[{"class": "norm", "factor": 2.0, "source": "s", "date": "2025"}] * 2),
        "t.json: a class has two factors",
    ),
    "key twice": ('{"name": "a", ' + text()[1:], "t.json:1:15: `name` is given twice"),
    "digits": (text(rows=[]).replace("[]", "1" * 5000), ": a number of 5,000 digits is too large"),
    "rows": (text(rows=[ROW] * (MAX_ROWS + 1)), f"t.json: rows: the list should have at most {MAX_ROWS} items, not"),
    "steers the terminal": (text(name="a\x1b[2J"), "t.json: name: it has characters that cannot be printed"),
    "factor of seconds": (
        text(factors=[{"class": "launch", "factor": 2.0, "source": "s", "date": "2025"}]),
        "factors[0]: 'launch' is not a class with a rate",
    ),
    "a list": ("[]", "t.json: input should be an object"),
    "no json": ('{\n  "name": x}', "t.json:2:11: this is not JSON"),
    "NaN": (text(rows=[ROW | {"rate": float("nan")}]), "NaN is not a JSON number"),
    "huge": (text(rows=[ROW | {"rate": 10**400}]), "rows[0].rate"),
    "deep": ("[" * 200_000, "t.json: it is nested too deep"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_an_invalid_table_is_reported_at_its_key(case: str) -> None:
    text, message = WRONG[case]
    with pytest.raises(RateError) as caught:
        table_of_json(text, "t.json")
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for name, message in {
        "none.json": "there is no file",
        "": "is not a regular file",
        "a\0b": "there is no file",
        "binary.json": "is not text in UTF-8",
        "large.json": "is larger than 8 MiB",
    }.items():
        with pytest.raises(RateError, match=message):
            read_table(tmp_path / name)


def test_agreement_of_rows_is_checked_in_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def counted(points: Sequence[Point], shape: tuple[int, ...]) -> float:
        compared.append(len(points))
        return rate_at(points, shape)

    monkeypatch.setattr(interval, "rate_at", counted)
    points = tuple(((k, 1), 1e9 if k % 2 else 1e9 * (1 + k / MAX_ROWS)) for k in range(1, MAX_ROWS + 1))
    assert interval.spread_of(points[:100]) > 0 and compared == [99] * 100
    compared.clear()
    assert interval.spread_of(points) > 0
    assert sum(compared) < interval.MOST_COMPARED**2


def test_each_class_has_one_unit() -> None:
    assert not set(FLOPS) & set(LINKS) and not set(SECONDS) & {*FLOPS, *LINKS}

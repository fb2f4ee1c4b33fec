"""`make kernels`: what is printed, and the exit code."""

from __future__ import annotations

import json

import pytest

from compiler.kernels.gate import Verdict
from tests.kernels.sweep import Row, main, table


def test_a_sweep_says_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--spec", "tiny", "--op", "rmsnorm_wgrad_", "--target", "sm_90", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(row["verdict"]["registers"] and not row["verdict"]["failures"] for row in found["rows"])
    calls = [row["call"] for row in found["rows"]]
    assert any("bfloat16[16, 16]" in call for call in calls) and any("float32[16, 8]" in call for call in calls)


def test_nothing_found_is_a_failure() -> None:
    assert main(["--spec", "tiny", "--op", "no such op"]) == 1


def test_the_table() -> None:
    passes = Verdict("_forward", "sm_90", (), 40, 1024, 0, 128, 12, ("HGMMA",), 16)
    narrow = Verdict("_forward", "sm_90", (), 48, 512, 0, 128, 10, (), 4)
    spills = Verdict("_forward", "sm_100", ("spills 8 bytes",), 255, 0, 8, 128, 4)
    rows = [Row(spec, "f(x)", "f_d8", each) for each in (passes, narrow, spills) for spec in ("a.dsc", "b.dsc")]
    assert table(rows, colour=False).splitlines() == [
        "kernel         registers  shared  an SM  load  instructions",
        "f_d8._forward  48         1024    10     16    HGMMA",
        "f_d8._forward on sm_100 spills 8 bytes: f(x) of a.dsc, and 1 more",
    ]
    assert "\033[31mf_d8._forward on sm_100 spills 8 bytes\033[0m" in table(rows, colour=True)

"""An emitted segment names the line of `spec.resolved` that asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.emit.stage_modules import add_origin_comment
from compiler.ir import Segment, SegmentCode, Use
from dsl.canonical import canonical
from dsl.load import load
from runtime.contract.names import Site

HYBRID = load(Path(__file__).parents[2] / "specs" / "laptop-hybrid.dsc")


@pytest.mark.parametrize(
    ("site", "line"),
    [
        ("embed", "vocab = 2048"),
        ("L0.attention", "attention deltanet"),
        ("L0.ffn", "layers 0..0"),
        ("L2.attention", "attention deltanet"),
        ("L2.router", "layers 1..2"),
        ("L3.attention", "layers 3..3"),
        ("L3.experts", "layers 3..3"),
        ("final_norm", "norm_eps = 1e-05"),
        ("head", "vocab = 2048"),
    ],
)
def test_the_line_names_the_layer_or_the_shared_setting(site: str, line: str) -> None:
    use = Use(Site(site), Segment.__new__(Segment), (), (), ())
    resolved = canonical(HYBRID)
    head, origin, body = add_origin_comment(SegmentCode("s", "head\nrest\n", ()), use, HYBRID.model, resolved).split(
        "\n", 2
    )
    assert (head, body) == ("head", "rest\n")
    line_number, _, source_line = origin.removeprefix("# from spec.resolved:").partition(": ")
    assert source_line == line and resolved.split("\n")[int(line_number) - 1].strip().removesuffix(" {") == line

"""Which precisions `dsc train` accepts: built-in ones, ones equal to them, and BF16 moments with FP32 weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl.load import load
from dsl.rules import train_refusals
from tests import copies

SPECS = Path(__file__).parents[2] / "specs"


def refusals(folder: Path, block: str) -> list[tuple[str, str]]:
    """(message, hint) of each reason why the quickstart cannot train with this block as its precision."""
    path = folder / "mine.dsc"
    run = "run mine extends quickstart { precision = mine }\n"
    path.write_text(f'import "quickstart.dsc"\nprecision mine {block}\n{run}', "utf-8")
    copies.copy(SPECS / "quickstart.dsc", folder)
    return [(item.message, item.hint) for item in train_refusals(load(path, "mine"))]


@pytest.mark.parametrize(
    "block",
    [
        *("{ }", "extends fp32 { }", "extends fp64 { }"),
        "{ master = bf16, moments = bf16 }",
        *("{ moments = bf16 }", "extends fp32 { moments = bf16 }", "extends bf16 { master = fp32, moments = bf16 }"),
        *("extends fp8_block { }", "extends fp8_block { moments = fp32 }"),
        *("extends mxfp8 { }", "extends mxfp8 { gradient_rounding = stochastic, moments = bf16 }"),
        *("extends nvfp4 { }", "extends nvfp4 { hadamard = false, high { first = 0, last = 2 } }"),
        *("extends fp8_block { activation_tile = 128x128, dispatch = bf16 }", "{ attention_output = e5m6 }"),
    ],
)
def test_precisions_that_train(block: str, tmp_path: Path) -> None:
    assert refusals(tmp_path, block) == []


@pytest.mark.parametrize(
    ("block", "differing", "nearest"),
    [
        ("extends fp64 { moments = bf16 }", "moments in bf16", "fp64"),
        ("extends fp64 { moments = fp32 }", "moments in fp32", "fp64"),
        ("extends fp32 { moments = fp64 }", "moments in fp64", "fp32"),
        ("extends fp64 { linear = fp32 }", "linear in fp32", "fp64"),
        ("extends bf16 { linear = fp32, gradients = bf16 }", "linear in fp32, gradients in bf16", "bf16"),
        ("{ gradients = bf16, moments = bf16 }", "gradients in bf16", "bf16"),
        ("extends fp32 { compute = bf16, moments = bf16 }", "compute in bf16", "fp32"),
        ("extends fp8_block { combine = e4m3 }", "combine in e4m3", "fp8_block"),
        ("extends fp8_block { dispatch = bf16 }", "dispatch in bf16", "fp8_block"),
        ("extends fp8_block { weight_tile = 1x128 }", "weight_tile = 1x128", "fp8_block"),
        ("extends fp8_block { activation_tile = 1x64 }", "activation_tile = 1x64", "fp8_block"),
        ("extends fp8_block { hadamard = true }", "hadamard", "fp8_block"),
        ("extends fp8_block { gradient_rounding = stochastic }", "stochastic gradients", "fp8_block"),
        ("extends nvfp4 { combine = fp32 }", "combine in fp32", "nvfp4"),
        ("extends fp8_block { promote = 256 }", "promote = 256", "fp8_block"),
        (
            "{ linear = e4m3, activation_tile = 1x128, weight_tile = 128x128 }",
            "dispatch in bf16, no promote",
            "fp8_block",
        ),
        ("{ combine = fp32, dispatch = fp32 }", "dispatch in fp32, combine in fp32", "bf16"),
    ],
)
def test_precisions_that_do_not_train(block: str, differing: str, nearest: str, tmp_path: Path) -> None:
    """The message lists the differences from the nearest precision that trains, without moments that are allowed."""
    message = f"precision mine has {differing}; training runs only in fp64, fp32, bf16, fp8_block, mxfp8 or nvfp4"
    assert refusals(tmp_path, block) == [(message, f"write `precision = {nearest}`")]

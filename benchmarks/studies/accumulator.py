"""Trains with E4M3 products summed as in tensor cores without promotion: in an accumulator with few bits.

    python -m benchmarks.studies.accumulator SPEC -s precision=fp8_block … --out RUN [--resume] [--cache CACHE]

The tensor cores of an H800 keep about 14 bits of a sum of FP8 products (arXiv 2412.19437, §3.3.2). So DeepSeek-V3
promotes the sum to FP32 every 128 products, and applies the scales there. Here neither is done: operands are multiplied
by their scales (in FP32) before the product, and there is one accumulator for the whole sum. After each 32 products,
the number that one instruction sums, its significand is truncated to 14 bits. In between, products and the accumulator
are added in FP32. That an instruction also aligns products to the largest and truncates them is not emulated.

Weight gradients are added to their FP32 buffers as usual. This module replaces the one function that computes all
products of `fp8_block` without C++; everything else, C++ included, is as in `dsc train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from compiler.cli.main import main as dsc
from runtime.ops.product import add_product_
from runtime.ops.quantise import dequantise
from runtime.run.train import main as train

INSTRUCTION = 32  # products that an instruction sums
BITS = 14  # of the accumulator's significand, the hidden bit included
KEPT = -(1 << (24 - BITS))  # mask of the kept bits of an FP32 number
USERS = ("runtime.ops.linear", "runtime.ops.grouped_linear")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile a spec and train it in this process and its children. Returns the exit code of `dsc`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("-s", dest="set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--cache", type=Path)
    args = parser.parse_args(argv)
    build = args.out.with_name("build")
    caches = (["--cache", str(args.cache)], ["--data-cache", str(args.cache / "data")]) if args.cache else ([], [])
    if code := dsc(["compile", str(args.spec), "-o", str(build), *caches[0], *(f"-s{word}" for word in args.set)]):
        return code
    replace()
    words = [str(build), "--out", str(args.out), "--data", str(args.spec.parent), *caches[1]]
    return train([*words, *(["--resume"] if args.resume else [])])


def replace() -> None:
    """Replace the function for E4M3 products in this process."""
    for name in USERS:
        module = import_module(name)
        vars(module).update(runs_natively=_nothing, scaled_product=cut_product)


def cut_product(
    a_MC: Tensor, as_MB: Tensor, b_NC: Tensor, bs_NB: Tensor, start: int = 0, end: int | None = None
) -> Tensor:
    """a·bᵀ (FP32) over the columns [start, end). Each operand has one scale per row and tile of 128 columns."""
    a_MK, b_NK = dequantise(a_MC, as_MB)[:, start:end], dequantise(b_NC, bs_NB)[:, start:end]
    total_MN = torch.zeros((len(a_MK), len(b_NK)), dtype=torch.float32)
    for first in range(0, a_MK.shape[1], INSTRUCTION):
        terms = slice(first, first + INSTRUCTION)
        add_product_(total_MN, a_MK[:, terms], b_NK[:, terms].t())
        total_MN.view(torch.int32).bitwise_and_(KEPT)
    return total_MN


def _nothing(*operands: Tensor) -> bool:
    """Whether C++ takes these operands: never."""
    return False


if __name__ == "__main__":
    sys.exit(main())

"""A contestant that only computes the matrix products of a step, on one thread: the limit of this machine.

    python -m benchmarks.speed.limit SPEC --dtype float32 --wire READ,WRITE

Outputs are allocated beforehand, and each product has its own weights, as in training. The products are ours
(`runtime.ops.product`), the fastest that we know of: `python -m benchmarks.products` compares them with torch's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.speed.serve import serve
from benchmarks.speed.work import Product, Work, work_of
from dsl.load import resolve
from runtime.ops.product import product_


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--wire", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = resolve(args.spec).spec
    work = work_of(spec.model, spec.train.batch.end, spec.train.sequence)
    serve(args.wire, products_of(work, getattr(torch, args.dtype)), {})
    return 0


def products_of(work: Work, dtype: torch.dtype) -> Callable[[], None]:
    """A function that computes all products of a step. Products of one shape share all operands except weights."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def calls(product: Product) -> Callable[[], None]:
        weights, gradients = random(product.times, product.n, product.k), random(product.times, product.n, product.k)
        x_MK, y_MN = random(product.m, product.k), random(product.m, product.n)
        dx_MK, dy_MN = random(product.m, product.k), random(product.m, product.n)

        def run() -> None:
            for w_NK, g_NK in zip(weights, gradients, strict=True):
                product_(y_MN, x_MK, w_NK.T)
                product_(dx_MK, dy_MN, w_NK)
                product_(g_NK, dy_MN.T, x_MK)

        return run

    runs = [calls(product) for product in work.products]

    def step() -> None:
        for run in runs:
            run()

    return step


if __name__ == "__main__":
    sys.exit(main())

"""The kernels of the router against their reference ops, in Triton's interpreter. Checks are in checks_router.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.ops.routing import top_indices

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_router"

ROUTERS = [  # tokens, experts, softmax, groups, top groups, K, normalize, bias
    (0, 16, False, 4, 2, 3, True, True),
    (1, 4, False, 1, 1, 1, False, False),
    (9, 24, False, 6, 3, 5, True, True),  # no powers of two
    (13, 12, False, 12, 6, 4, True, True),  # one expert a group
    (7, 160, True, 8, 3, 6, False, False),  # DeepSeek-V2
    (5, 64, True, 1, 1, 6, False, False),  # DeepSeek-V2-Lite
    (6, 256, False, 8, 4, 8, True, True),  # DeepSeek-V3
    (5, 384, False, 1, 1, 8, True, True),  # Kimi K2
    (4, 128, True, 1, 1, 8, True, False),  # Qwen3
    (3, 512, True, 4, 4, 16, True, True),
]
groupings = pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (3, 2)])
scorings = pytest.mark.parametrize("softmax", [False, True], ids=["sigmoid", "softmax"])


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_route(interpret: Interpret, router: tuple[Any, ...]) -> None:
    interpret(CHECKS, "route", *router)


@scorings
@groupings
def test_ties_choose_the_first_expert(interpret: Interpret, softmax: bool, groups: int, top_groups: int) -> None:
    interpret(CHECKS, "ties", softmax, groups, top_groups)


@scorings
@groupings
def test_nan_scores_still_choose_experts(interpret: Interpret, softmax: bool, groups: int, top_groups: int) -> None:
    interpret(CHECKS, "nan_and_infinity", softmax, groups, top_groups)


@scorings
@pytest.mark.parametrize("normalize", [False, True], ids=["not normalized", "normalized"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 8, 2), (7, 24, 5), (5, 256, 8), (3, 300, 16), (40, 16, 1)])
def test_route_dgrad(interpret: Interpret, tokens: int, experts: int, k: int, softmax: bool, normalize: bool) -> None:
    interpret(CHECKS, "route_dgrad", tokens, experts, softmax, k, normalize)


@scorings
@pytest.mark.parametrize(
    ("sequences", "sequence", "experts", "k"), [(1, 1, 8, 2), (3, 45, 24, 5), (1, 100, 256, 8), (2, 32, 16, 1)]
)
def test_sequence_balance(
    interpret: Interpret, sequences: int, sequence: int, experts: int, k: int, softmax: bool
) -> None:
    interpret(CHECKS, "balance", sequences, sequence, experts, k, softmax)


def test_the_reference_breaks_ties_by_the_first() -> None:
    x_TE = torch.randint(4, (64, 33), generator=torch.Generator().manual_seed(1)).float()
    x_TE[1], x_TE[2, 3:9], x_TE[3] = 2.0, torch.nan, torch.nan
    assert torch.equal(top_indices(x_TE, 7), x_TE.sort(dim=1, descending=True, stable=True).indices[:, :7])

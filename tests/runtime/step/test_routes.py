"""FP8 blocks with both routes of tokens to experts: they differ by one rounding of sums, or not at all without sums.

With `route = nodes`, rows that return from one node are summed there in FP32 and rounded to BF16 once. One rank's
program with rows summed and rounded in this way gives the results of the ranks; with random rounding, it shows how far
these roundings move each result. Every token goes to every expert in whole tiles of rows, as in test_fp8_meshes.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import Moe, Spec
from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.step.trainer import Trainer
from tests.compiler.model.segments.rounding import SAMPLES, SPREADS, at_random, spread
from tests.runtime.step.processes import run_module
from tests.runtime.step.samples import RandomSamples, weight
from tests.runtime.step.test_fp8 import EVERYONE
from tests.runtime.step.test_fp8_meshes import SUMS, chosen
from tests.runtime.step.test_nodes import on_nodes

NODES = 2  # of a rank each
# Ops that add the rows of a token which came back → which argument rows are; order and top_k follow.
READERS = {"unpermute_add": 2, "permuted_rmsnorm_dgrad_add": 0}
Add = Callable[[Tensor, Tensor], Tensor]  # rows, and which of them each sum has → sums in the dtype of rows


def of(experts: int, route: str | None) -> Spec:
    """A spec whose tokens all go to all experts: on two ranks with a route, on one rank without."""
    ep = NODES if route else 1
    base = chosen(1, ep, ep)
    moe = EVERYONE.model_copy(update={"experts": experts, "top_k": experts})
    layers = tuple(
        layer.model_copy(update={"ffn": moe}) if isinstance(layer.ffn, Moe) else layer for layer in base.model.layers
    )
    base = base.model_copy(update={"model": base.model.model_copy(update={"layers": layers})})
    return on_nodes(base, NODES, route) if route else base


@pytest.fixture(scope="module")
def by(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Callable[[int, str], list[dict[str, Tensor]]]:
    """The results of both ranks after two steps, by the number of experts and the route."""

    @cache
    def run(experts: int, route: str) -> list[dict[str, Tensor]]:
        folder = tmp_path_factory.mktemp("ranks")
        spec = of(experts, route)
        assert spec.routes_by_nodes == (route == "nodes")
        write_build(folder / "builds" / "it", compile_spec(spec, segments=segments).files)
        run_module("tests.runtime.step.ranks", folder, NODES, "memory")
        return [load_file(folder / "out" / "it" / f"rank_{rank}.safetensors") for rank in range(NODES)]

    return run


def added_by_node(rows_SD: Tensor, order_S: Tensor, top_k: int, add: Add) -> Tensor:
    """Rows as they come back by nodes: of the rows of a token on a node the first has their sum, the others zeros."""
    tokens = rows_SD.shape[0] // top_k  # and so many rows has each expert
    node_S = torch.arange(rows_SD.shape[0]) // tokens * NODES // top_k
    rows_GK = torch.argsort(node_S * tokens + order_S // top_k, stable=True).view(
        NODES * tokens, -1
    )  # G: token on node
    return torch.zeros_like(rows_SD).index_copy_(0, rows_GK[:, 0], add(rows_SD, rows_GK))


def to_nearest(rows_SD: Tensor, rows_GK: Tensor) -> Tensor:
    """Sums of rows in FP32, rounded once, to even."""
    return rows_SD.float()[rows_GK].sum(1).to(rows_SD.dtype)


def randomly(generator: torch.Generator) -> Add:
    return lambda rows_SD, rows_GK: at_random(rows_SD.float()[rows_GK].sum(1), generator).to(rows_SD.dtype)


def reading(function: Callable[..., Any], at: int, add: Add) -> Callable[..., Any]:
    """An op that reads rows summed by node."""

    def call(*args: Any) -> Any:
        rows, order, top_k = args[at : at + 3]
        return function(*args[:at], added_by_node(rows, order, top_k, add), *args[at + 1 :])

    return call


def step(folder: Path, add: Add | None = None) -> dict[str, Tensor]:
    """Gradients and losses of the first step of one rank; with `add`, rows are summed by node."""
    build = Build.open(folder)
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
    trainer = Trainer(build, 0, samples, samples, Board(1).bind(0))
    for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
        bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)))
    for name, bias in trainer.state.biases.items():
        bias.copy_(torch.from_numpy(weight(name, tuple(bias.shape))))
    replaced = []
    package = f"dsc_build_{build.digest[:16]}"
    for namespace in [vars(m) for name, m in sys.modules.items() if name.startswith(f"{package}.segments.")]:
        for name, argument in READERS.items():
            if add is not None and name in namespace:
                replaced.append((namespace, name, namespace[name]))
                namespace[name] = reading(namespace[name], argument, add)
    assert add is None or {name for _, name, _ in replaced} == READERS.keys()
    sums = trainer.accumulate()
    for namespace, name, value in replaced:
        namespace[name] = value
    result = {
        f"gradient/{e.name}": value.clone() for _, e, value in trainer.state.logical(lambda bucket: bucket.gradients)
    }
    row = trainer.apply(sums)
    return result | {"losses": torch.tensor([row["loss"], row["mtp_loss"]], dtype=torch.float64)}


def of_ranks(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients and losses of the first step of a mesh, as `step` gives them."""
    gradients = {name: value for rank in ranks for name, value in rank.items() if name.startswith("gradient/")}
    return gradients | {"losses": ranks[0]["rows"][0, :2]}


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """(largest relative error of a tensor, its name)."""
    assert found.keys() == wanted.keys()
    pairs = ((name, found[name].double(), tensor.double()) for name, tensor in wanted.items())
    return max((float((tensor - expected).norm() / expected.norm()), name) for name, tensor, expected in pairs)


def test_routes_differ_by_one_rounding_of_the_sums(
    by: Callable[[int, str], list[dict[str, Tensor]]], tmp_path: Path, segments: Segments
) -> None:
    """With two experts per node, each route has the losses and gradients of one rank with the same sums."""
    write_build(tmp_path / "one", compile_spec(of(4, None), segments=segments).files)
    exact = step(tmp_path / "one")
    assert off(of_ranks(by(4, "flat")), exact) <= (SUMS, "")
    results = of_ranks(by(4, "nodes"))
    assert off(results, step(tmp_path / "one", to_nearest)) <= (SUMS, "")
    generators = (torch.Generator().manual_seed(seed) for seed in range(SAMPLES))
    samples = [step(tmp_path / "one", randomly(generator)) for generator in generators]
    for name, value in exact.items():
        size, error = (
            spread([sample[name] for sample in samples], value),
            float((results[name] - value.double()).norm()),
        )
        assert 0 < error <= SPREADS * size, f"{name}: off by {error:.3g}, roundings alone {size:.3g}"


def test_without_a_sum_routes_have_the_same_bits(by: Callable[[int, str], list[dict[str, Tensor]]]) -> None:
    """With one expert per node, no rows are summed: all losses, gradients and weights of two steps are equal."""
    for flat, nodes in zip(by(2, "flat"), by(2, "nodes"), strict=True):
        counted = {name for name in flat if name == "exchanged" or name.startswith("routed/")}  # only of single rows
        assert flat.keys() - counted == nodes.keys()
        assert [name for name in nodes if not torch.equal(flat[name], nodes[name])] == []

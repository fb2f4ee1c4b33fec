"""CUDA graphs on the pretend device: what is captured, and that replays equal launches, to the bit and in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from compiler.plan.spec_files import with_schedule
from dsl.schema import Kernels, ScheduleBlock, Spec
from runtime.contract import KernelList
from runtime.contract.names import ProgramName
from runtime.step.graphs import Graphs
from tests.compiler.schedule.offloading import offloading
from tests.gpu.graph_ranks import STEPS
from tests.gpu.pretend import DEVICE, Kind, pretended
from tests.gpu.pretend_graphs import POOLS, pretended_graphs
from tests.gpu.test_device_path import Mesh, small
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec, with_host_state

ROWS, SHARDED, ON_HOST = "rows of experts", "sharded over data ranks", "return from host memory"
OFFLOADING = with_schedule(
    spec(2, 1, 1, 6, of="llama", precision="fp32").model_copy(update={"schedule": ScheduleBlock(file="mine.schedule")}),
    offloading("gpipe", 2, 6, Fraction(1, 3)),
)


def graphed(of: Spec) -> Spec:
    return of.model_copy(update={"kernels": Kernels(graphs=True)})


# The spec, its ranks, and why some calls are not captured.
CASES: dict[str, tuple[Spec, int, tuple[str, ...]]] = {
    "dense_pipeline": (spec(2, 1, 1, 4, of="latent", precision="fp32", schedule="zb1p"), 2, ()),
    "dense_sharded": (spec(1, 1, 2, 2, of="latent", precision="fp32", zero=2), 2, (SHARDED,)),
    "dense_average": (with_host_state(spec(1, 1, 1, 2, of="latent", precision="bf16")), 1, ()),
    "dense_offloading": (OFFLOADING, 2, (ON_HOST,)),
    "experts": (small(Mesh(1, 2, "bf16")), 2, (ROWS,)),
    "fp8": (small(Mesh(1, 1, "fp8_block")), 1, (ROWS,)),
}


@pytest.mark.parametrize("name", CASES)
def test_replays_equal_launches(name: str, tmp_path: Path, segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, moments and losses are equal to the bit to those without graphs. The device sees the same launches, in
    the same order, except for the copies of what a graph reads."""
    of, world, reasons = CASES[name]
    build = compile_spec(graphed(of), segments=segments)
    write_build(tmp_path / "build", build.files)
    monkeypatch.setenv("DSC_OPS", "torch")
    for mode in ("graphs", "plain"):
        run_module("tests.gpu.graph_ranks", tmp_path, world, mode)
    graphs = KernelList.from_json((tmp_path / "build" / "kernels.json").read_bytes()).graphs
    assert graphs is not None and len(graphs.others) == len(reasons)
    assert f"graphs: {graphs.sentence}; the plan prices no launch less\n" in build.summary
    assert all(why in plain.reason for plain, why in zip(graphs.others, reasons, strict=True))
    num_captured = 0
    for rank in range(world):
        expected, actual = (load_file(tmp_path / f"{mode}_{rank}.safetensors") for mode in ("plain", "graphs"))
        assert expected.keys() == actual.keys()
        for key, tensor in expected.items():
            assert torch.equal(actual[key], tensor), (rank, key)
        plain, replayed = (facts(tmp_path / f"{mode}_{rank}.json") for mode in ("plain", "graphs"))
        assert not any(plain["captured"].values())
        num_captured += max(count for program, count in replayed["captured"].items() if program.startswith("train"))
        for step in range(STEPS if of.train.ema is None else 0):  # a thread computes the moving average
            assert_same_without_copies(replayed["steps"][step], plain["steps"][step])
    columns = of.parallel.data * of.parallel.tensor
    assert num_captured == graphs.replayed * columns > 0


def facts(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def assert_same_without_copies(replayed: list[str], plain: list[str]) -> None:
    """`replayed` is `plain`, with copies inserted."""
    rest = iter(plain)
    wanted = next(rest, None)
    for entry in replayed:
        if entry == wanted:
            wanted = next(rest, None)
        else:
            assert entry == "launch copy_ on compute", (entry, wanted)
    assert wanted is None, wanted


# ---------------------------------------------------------------- graphs alone


class Space:
    """Weights, which keep their addresses."""

    def __init__(self) -> None:
        self.weight = torch.arange(4.0, device=DEVICE)


def scaled(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * weight


@pytest.fixture
def seen() -> Iterator[list[tuple[Kind, str]]]:
    """The launches and copies of the pretend device, in order."""
    seen: list[tuple[Kind, str]] = []
    with pretended(lambda kind, what, _: seen.append((kind, what))), pretended_graphs():
        yield seen


def run_chain(graphs: Graphs, space: Space, first: float, length: int) -> list[float]:
    """Run a program: a chain of calls, each on the result of the one before."""
    graphs.begin(ProgramName("train_1"))
    x = torch.full((4,), first, device=DEVICE)
    for _ in range(length):
        _, x = graphs.call(scaled, (space.weight, x))
    numbers: list[float] = x.tolist()
    return numbers


@pytest.mark.usefixtures("seen")
def test_graphs_share_memory_that_is_free() -> None:
    space = Space()
    graphs = Graphs(DEVICE, (space,))
    space.weight.add_(1.0)
    for first in (1.0, 2.0, 3.0, 4.0):
        assert run_chain(graphs, space, first, 8) == [first * n**8 for n in (1.0, 2.0, 3.0, 4.0)]
    assert POOLS[-1].num_bytes <= 3 * space.weight.nbytes, "of eight results, two live at a time, besides the copy"


@pytest.mark.usefixtures("seen")
def test_a_weight_that_moves_is_noticed() -> None:
    space = Space()
    graphs = Graphs(DEVICE, (space,))
    for _ in range(2):
        run_chain(graphs, space, 1.0, 2)
    space.weight.mul_(2.0)
    assert run_chain(graphs, space, 1.0, 2) == [0.0, 4.0, 16.0, 36.0]
    space.weight = space.weight.clone()
    with pytest.raises(AssertionError, match="argument 0 of a graph has moved"):
        run_chain(graphs, space, 1.0, 2)


def test_capturing_executes_nothing_and_forbids_what_the_host_reads(seen: list[tuple[Kind, str]]) -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(3, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        seen.clear()
        y = (x + 1).mul_(2)
        x.add_(5)
        with pytest.raises(AssertionError, match="host waits tolist while a graph is captured"):
            y.tolist()
        graph.capture_end()
    assert not seen and x.tolist() == [1.0] * 3 and y.isnan().all().item()
    graph.replay()
    assert [what for kind, what in seen if kind == "launch"][-3:] == ["add", "mul_", "add_"]
    assert y.tolist() == [4.0] * 3 and x.tolist() == [6.0] * 3


def test_a_cpu_has_no_graphs() -> None:
    graphs, space = Graphs(torch.device("cpu"), ()), torch.ones(2)
    for _ in range(3):
        graphs.begin(ProgramName("train_1"))
        assert graphs.call(scaled, (space, space))[0] is space and not graphs.exist

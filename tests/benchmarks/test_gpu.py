"""Tests of the parts of the GPU benchmark that need no GPU: its cases of kernels, and its peer libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.gpu import libraries, split
from benchmarks.gpu.arguments import reference, router, routing
from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.checks import check, library_tasks, tasks
from benchmarks.gpu.libraries import PEERS
from benchmarks.gpu.peers import FORMULAS
from benchmarks.gpu.sizes import EVEN, TINY, V3, Make
from benchmarks.gpu.verify import copied, describe, error, exact, folder, moved_bytes, results
from compiler.emit.kernels import KERNELS, emit_kernel
from compiler.emit.kernels.libraries import LIBRARIES
from dsl.schema import OPTIMIZERS
from runtime.build.launches import Launch
from runtime.ops import OPS
from tests.compiler.emit.kernels.conftest import interpret  # noqa: F401
from tests.compiler.emit.kernels.gate import judge
from tests.runtime.ops.native.paths import path  # noqa: F401

Interpret = Callable[..., Any]
BF16 = torch.bfloat16
TASKS = [{**task, "sizes": "tiny"} for task in tasks("odd")]
on_tiny = pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task['name']}-{task['dtype']}")


@pytest.fixture(scope="module", autouse=True)
def _folder_of_kernels() -> Iterator[None]:
    yield
    folder().cleanup()
    folder.cache_clear()


def test_every_kernel_has_a_case() -> None:
    assert set(KERNELS) <= {case.op for case in CASES} <= {*OPS, *OPTIMIZERS}
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(FORMULAS) | set(PEERS) <= {case.op for case in CASES}


def test_goals_name_their_peer() -> None:
    for case in CASES:
        assert (case.goal.kind == "ratio") == bool(case.goal.peer)
        assert not case.goal.peer or case.goal.peer in PEERS[case.op], case.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_has_a_kernel_at_v3s_sizes(case: Case) -> None:
    """The arguments of a case are made on the meta device, and its kernel is emitted."""
    arguments = case.arguments(V3, Make(case.dtypes[0], "meta"))
    assert bool(emit_kernel(case.op, describe(arguments), 132)) == (case.op in KERNELS)
    for index in (*case.written, *case.unread):
        assert isinstance(arguments[index], Tensor)


def test_flops_and_bytes_give_the_published_times() -> None:
    """FLOPs and bytes give the published times at an H200's 790 and 1600 TFLOPS and 4.3 TB/s."""

    def seconds(name: str, rate: float) -> float:
        case = next(case for case in CASES if case.name == name)
        assert case.flops
        return case.flops(V3) / rate

    assert round(seconds("mla_attention", 790e12) * 1e6) == 870
    assert round(seconds("mla_attention_dgrad", 790e12) * 1e6) == 2262
    assert round(seconds("linear_fp8 out-projection", 1600e12) * 1e6) == 601
    assert round(seconds("grouped_linear_fp8 up", 1600e12) * 1e6) == 1203
    assert round(seconds("linear_cross_entropy", 790e12) * 1e4) == 96
    case = next(case for case in CASES if case.op == "unpermute")
    arguments = case.arguments(V3, Make(BF16, "meta"))
    moved = moved_bytes(case, V3, arguments, (torch.empty(4096, 7168, dtype=BF16, device="meta"),))
    assert round(moved / 4.3e12 * 1e6) == 123
    case = next(case for case in CASES if case.op == "adamw")
    arguments = case.arguments(V3, Make(BF16, "meta"))
    moved = moved_bytes(case, V3, arguments, [arguments[i] for i in case.written])
    assert moved == 22 * V3.parameters  # 5.1 ms for 1e9


@pytest.mark.usefixtures("path")
@on_tiny
def test_the_op_passes_the_check_of_its_kernel(task: dict[str, Any]) -> None:
    """On the CPU the op stands for the kernel. A formula in torch may save a rounding."""
    case, dtype = CASES[task["case"]], getattr(torch, task["dtype"])
    arguments = case.arguments(TINY, Make(dtype, "cpu"))
    expected = exact(case, arguments)
    outputs = results(case, reference(case.op), copied(arguments))
    assert error(case, dtype, outputs, expected) <= 1
    broken = [x.clone() for x in outputs]
    broken[0].view(-1)[: max(1, broken[0].numel() // 8)] = 0 if outputs[0].dtype != torch.int64 else -1
    assert error(case, dtype, broken, expected) > 1
    if case.op in FORMULAS:
        with_formula = results(case, FORMULAS[case.op], copied(arguments))
        picked = expected[: len(with_formula)] if not case.written else expected[-len(with_formula) :]
        looser = replace(case, roundings=case.roundings + 1)
        # do·v is rounded before a number of nearly its size is subtracted: this doubles the error of gradients.
        assert error(looser, dtype, with_formula, picked) <= (2 if case.op.endswith("attention_dgrad") else 1)


@on_tiny
def test_checks_pass_with_other_random_numbers(task: dict[str, Any]) -> None:
    """Another device draws other numbers: few of them may round badly, scores may be nearly equal."""
    case, dtype = CASES[task["case"]], getattr(torch, task["dtype"])
    for seed in range(1, 6):
        arguments = case.arguments(TINY, Make(dtype, "cpu", seed))
        assert error(case, dtype, results(case, reference(case.op), copied(arguments)), exact(case, arguments)) <= 1


def test_expert_choices_do_not_depend_on_rounding() -> None:
    for seed in (2, 42):  # seeds with two scores that differ by less than rounding
        logits, bias = router(EVEN, Make(BF16, "cpu", seed))
        wide = OPS["route"](logits.double(), bias.double(), *routing(EVEN))
        assert torch.equal(OPS["route"](logits, bias, *routing(EVEN))[1], wide[1])


@on_tiny
def test_a_kernel_passes_its_check(interpret: Interpret, task: dict[str, Any]) -> None:  # noqa: F811
    """What `make gpu` does at larger sizes."""
    interpret("tests.gpu.interpreted", "kernel", task)


# ---------------------------------------------------------------- others

ON_CPU = [
    (case.op, name)
    for case in CASES
    for name in PEERS.get(case.op, {})
    if case.variant in ("", "up", "out-projection")
    and name.removesuffix("s") in ("_grouped_mm", "BF16 _grouped_mm", "BF16 product", "its product", "_fused_adamw_")
]


@pytest.mark.parametrize(("op", "name"), ON_CPU)
def test_libraries_compared_with_do_the_same_work(op: str, name: str) -> None:
    """Libraries compute the same on a CPU, for one source whose rows are in the order that they expect."""
    case = next(case for case in CASES if case.op == op)
    sizes = replace(TINY, rows=24, inner=24, hidden=32, heads=4, value=8)  # _grouped_mm wants whole 16 bytes
    dtype = torch.float32 if op == "adamw" else BF16
    arguments = case.arguments(sizes, Make(dtype, "cpu"))
    if op == "adamw":
        arguments = (*arguments[:5], 1.0, *arguments[6:])
    expected, inputs = exact(case, arguments), copied(arguments)
    output = PEERS[op][name](*inputs)()
    if op == "adamw":
        assert error(case, dtype, (inputs[0],), expected[:1]) <= 1
    elif not op.startswith("linear_cross_entropy"):  # which only computes the products
        started = arguments[0].double() if op.endswith("_") else torch.zeros(())
        assert error(replace(case, roundings=3), BF16, (output,), (expected[0] - started,)) <= 1


@pytest.mark.parametrize("op", ["mla_attention", "gqa_attention"])
def test_attention_of_torch_is_the_same(op: str) -> None:
    case = next(case for case in CASES if case.op == op)
    arguments = case.arguments(TINY, Make(torch.float32, "cpu"))
    heads_of = libraries.mla_heads if op == "mla_attention" else libraries.gqa_heads
    o_BHSV = libraries.sdpa(heads_of, SDPBackend.MATH)(*arguments)()
    output = o_BHSV.transpose(1, 2).flatten(2).flatten(0, 1)
    assert error(case, torch.float32, (output,), exact(case, arguments)[:1]) <= 1

    dgrad = next(case for case in CASES if case.op == f"{op}_dgrad")
    inputs = dgrad.arguments(TINY, Make(torch.float32, "cpu"))
    gradients = libraries.sdpa_dgrad(heads_of, SDPBackend.MATH)(*inputs)()
    assert all(x.isfinite().all() and x.abs().sum() > 0 for x in gradients)


# ---------------------------------------------------------------- the split of the SMs


@pytest.mark.parametrize(("rows", "copied_rows", "programs"), [(9, 9, 3), (5, 3, 8), (1, 1, 1)])
def test_the_quantising_copy(interpret: Interpret, rows: int, copied_rows: int, programs: int) -> None:  # noqa: F811
    interpret("tests.gpu.interpreted", "copy", rows, copied_rows, 384, programs)


def test_the_kernels_of_the_split_compile() -> None:
    x = torch.empty(1 << 16, 7168, dtype=BF16, device="meta")
    q, s = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(len(x), 56, device="meta")
    copy = Launch(split._quantising_copy, (x, q, s, 4096, 7168, 64, 20), (("enable_fp_fusion", True), ("num_warps", 8)))
    selection = Launch(split._where, (torch.empty(1024, dtype=torch.int32, device="meta"), 20_000), (("num_warps", 1),))
    for launch in (copy, selection):
        assert not judge(launch).failures


def test_libraries_are_checked_with_the_cases_of_their_ops() -> None:
    """On CPUs grouped_mm runs; the others say what they lack."""
    listed = library_tasks()
    assert {task["library"] for task in listed} == {*LIBRARIES}
    answers = {task["name"]: check({**task, "sizes": "even"}, "cpu") for task in listed if task["library"] != "cudnn"}
    assert answers["grouped_linear up by grouped_mm"]["error"] <= 1
    assert "failed" not in answers["grouped_linear up by grouped_mm"]
    assert answers["linear_fp8 q up by deep_gemm"] == {"left_out": "deep_gemm is not installed"}

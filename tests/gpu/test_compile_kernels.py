"""Kernels are compiled before a rank trains: all that a step launches, each once, in workers, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiler.emit.folder import write_build
from compiler.emit.kernels import emit_kernel
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import Dense, HeadDim, Mla, Rope, ScheduleBlock, Spec
from runtime.build import compile_kernels as compiling
from runtime.build.build import Build
from runtime.build.compile_kernels import CallCache, compile_for_rank, compile_kernels, require_packages, uses_of
from runtime.contract import KernelUse, LaunchList
from runtime.launch.heartbeat import Board
from runtime.run import loop
from runtime.step.start import Start
from runtime.system.outcome import ReportedError
from tests.compiler.emit.kernels.shapes import describe
from tests.gpu.test_device_path import Mesh, small
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import MOE, model

TARGET = "cuda:90:32"


def no_action(_: str) -> None: ...


def two_tiles() -> Spec:
    """One FP8 rank. Each matrix has several tiles of 128 rows and columns: with one, the strides of scales are those of
    the reference ops, which the pretend device runs."""
    base = small(Mesh(1, 1, "fp8_block"))
    head_dim, rope = HeadDim(nope=128, rope=64, value=128), Rope(theta=100.0)
    attention = Mla(heads=2, query_rank=256, kv_rank=256, head_dim=head_dim, rope=rope)
    experts = MOE.model_copy(update={"inner": 256, "experts": 4, "groups": 2, "top_groups": 1, "top_k": 2})
    layers = model(attention, Dense(inner=256), experts, mtp=True).model_copy(update={"hidden": 256})
    train = base.train.model_copy(update={"sequence": 128})
    return base.model_copy(update={"model": layers, "train": train})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Path:
    path = tmp_path_factory.mktemp("kernels")
    write_build(path / "build", compile_spec(two_tiles(), segments=segments).files)
    return path


def test_all_that_a_step_launches_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel call of a step on the pretend device, with its real shapes, strides and numbers, is in the cache."""
    build = Build.open(folder / "build")
    cache = CallCache(folder / "triton", build, TARGET)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache.folder))
    notices: list[str] = []
    uses = uses_of(build, 0)
    assert compile_kernels(cache, uses, 2, set_action=no_action, say=notices.append) == len(uses) > 30
    assert notices[0].startswith(f"compiling kernels, {len(uses)} distinct calls, into {cache.folder}")
    before = {entry.name for entry in cache.folder.iterdir()}

    monkeypatch.setenv("DSC_OPS", "torch")
    run_module("tests.gpu.device_path", folder, 1)
    run_module("tests.gpu.compile_calls", folder / "build", folder / "calls_0.json", TARGET)
    assert {entry.name for entry in cache.folder.iterdir()} == before

    def no_workers(*_: object) -> None:
        raise AssertionError("a later run starts no workers")

    monkeypatch.setattr(compiling, "run", no_workers)
    assert compile_kernels(cache, uses, 2, set_action=no_action, say=notices.append) == 0


def one_call(build: Build, op: str) -> KernelUse:
    return next(use for use in uses_of(build, 0) if use.op == op)


def test_a_later_run_compiles_what_is_missing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose entry was removed, whose record is damaged, or whose kernel's text changed, is compiled again."""
    build = Build.open(folder / "build")
    cache, use = CallCache(tmp_path, build, TARGET), one_call(build, "rmsnorm_wgrad_")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiled() -> int:
        return compile_kernels(cache, [use], 1, set_action=no_action, say=no_action)

    assert (compiled(), compiled()) == (1, 0)
    (record,) = (tmp_path / "calls").glob("*.json")
    entry, *_ = json.loads(record.read_text())
    shutil.rmtree(tmp_path / entry)
    assert (compiled(), compiled()) == (1, 0)
    record.write_text("[1")
    assert (compiled(), compiled()) == (1, 0)
    name = f"kernels/{use.kernel}.py"
    changed = replace(build, files={**build.files, name: build.files[name] + b"# changed"})
    assert cache.holds(use)
    assert not replace(cache, build=changed).holds(use)
    assert not replace(cache, target="cuda:100:32").holds(use)


def test_a_kernel_that_does_not_compile_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown target stands for an error of the compiler."""
    build = Build.open(folder / "build")
    cache, use = CallCache(tmp_path, build, "cuda:7:32"), one_call(build, "adamw")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        ReportedError, match=r"^kernels do not compile for cuda:7:32: kernels/adamw\.py: .*PTXASError.*sm_7"
    ):
        compile_kernels(cache, [use], 1, set_action=no_action, say=no_action)
    assert not cache.holds(use)


def test_ranks_begin_with_different_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them compile every call, so that two that share a cache meet at few locks."""
    build = Build.open(folder / "build")
    orders: list[list[int]] = []
    monkeypatch.setattr(compiling, "run", lambda _command, tasks, *_: orders.append([task["call"] for task in tasks]))
    cache, uses = CallCache(folder / "none", build, TARGET), uses_of(build, 0)
    for first in (0, 7):
        compile_kernels(cache, uses, 1, first=first, set_action=no_action, say=no_action)
    assert orders[1] == [*orders[0][7:], *orders[0][:7]]


def test_a_pipeline_rank_compiles_its_own_segments(tmp_path: Path, segments: Segments) -> None:
    linear = small(Mesh(2, 1, "bf16")).model_copy(update={"schedule": ScheduleBlock(name="1f1b")})
    write_build(tmp_path, compile_spec(linear, segments=segments).files)
    build = Build.open(tmp_path)
    by_rank = [uses_of(build, rank) for rank in range(2)]
    for rank, uses in enumerate(by_rank):
        imported = set(
            re.findall(r"^from \.\.segments import (\w+)$", build.files[f"stages/rank_{rank}.py"].decode(), re.M)
        )
        assert {name for use in uses for name in use.segments} >= imported
        assert all(not use.segments or imported.intersection(use.segments) for use in uses)
    assert {*by_rank[0]} | {*by_rank[1]} == {*LaunchList.from_json(build.files["launches.json"]).calls}
    assert {*by_rank[0]} != {*by_rank[1]}


def test_the_ranks_of_a_machine_share_its_cores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiles all calls of its stage, in an order of its own; ranks on CPUs compile nothing."""
    build = Build.open(folder / "build")
    (node,) = build.plan.cluster
    plan = replace(build.plan, mesh=replace(build.plan.mesh, dp=32), cluster=(replace(node, nodes=4, devices=8),))
    build = replace(build, plan=plan)
    cache, calls = CallCache(folder / "none", build, TARGET), len(uses_of(build, 0))
    asked: list[tuple[int, int, int]] = []

    def compiled(_cache: CallCache, uses: Sequence[KernelUse], processes: int, *, first: int, **_: object) -> None:
        asked.append((len(uses), processes, first))

    monkeypatch.setattr(compiling, "cache_of", lambda _: cache)
    monkeypatch.setattr(compiling, "compile_kernels", compiled)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for rank, device in ((0, "cuda"), (11, "cuda"), (0, "cpu")):
        compile_for_rank(build, rank, device, no_action, no_action)
    assert asked == [(calls, 8, 0), (calls, 8, 3 * calls // 8)]


def test_kernels_are_compiled_before_a_rank_connects(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ConnectsError(Exception): ...

    order: list[str] = []

    def trainer(*_: object) -> None:
        order.append("connect")
        raise ConnectsError

    monkeypatch.setattr(loop, "compile_for_rank", lambda *_: order.append("compile"))
    monkeypatch.setattr(loop, "Trainer", trainer)
    monkeypatch.setattr(loop.Loop, "_samples", lambda *_: None)
    monkeypatch.setattr(loop.Loop, "_validation", lambda _: None)
    run = loop.Loop(Build.open(folder / "build"), tmp_path, tmp_path, None, Start())
    with pytest.raises(ConnectsError):
        run.rank(0, 1, Board(1))
    assert order == ["compile", "connect"]


def test_a_library_that_is_not_installed_is_named(folder: Path) -> None:
    build = Build.open(folder / "build")
    require_packages(build)
    text = emit_kernel("delta_rule", describe(_delta_rule()), 132, "fla")
    assert text is not None and importlib.util.find_spec("fla") is None
    needing = replace(build, files={**build.files, f"kernels/{text.name}.py": text.source.encode()})
    with pytest.raises(ReportedError, match=rf"^kernels/{text.name}\.py needs the package fla: install it on each"):
        require_packages(needing)


def _delta_rule() -> tuple[object, ...]:
    q, gates = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(8, 2)
    return q, q, q, gates.bfloat16(), gates, 8, 2

"""Compare the launches, waits, host reads and group calls of a step on the pretend device of each rank with goldens.

`pytest --bless tests/gpu/test_device_path.py` rewrites tests/golden/device_path; the diff says what a change of the
runtime, of an op or of a program's order does on a GPU.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import BUILT_IN, Dense, Device, HeadDim, Machine, Mla, Rope, Spec
from runtime.contract import RunPlan
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import MOE, model, spec

GOLDEN = Path(__file__).parents[1] / "golden" / "device_path"
# Peaks of a device that needs padded rows: multiples of 8 in BF16, of 128 in FP8 blocks.
DEVICE = Device(name="few", memory=4 * 10**9, sms=8, bf16=1e12, fp8=2e12, hbm=1e12)


class Mesh(NamedTuple):
    pp: int
    ep: int
    precision: str
    nodes: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.ep


def num_micro_batches(mesh: Mesh) -> int:
    return 2 * mesh.pp


def small(mesh: Mesh) -> Spec:
    """Two layers and MTP; two of the three are mixtures of experts."""
    experts = MOE.model_copy(update={"inner": 128, "experts": 4, "groups": 2, "top_groups": 1, "top_k": 2})
    attention = Mla(
        heads=2,
        query_rank=32,
        kv_rank=16,
        head_dim=HeadDim(nope=16, rope=16, value=16),
        rope=Rope(theta=100.0),
    )
    full = model(attention, Dense(inner=128), experts, mtp=True)
    reduced = full.model_copy(
        update={"hidden": 64, "layers": (full.layers[0], full.layers[1].model_copy(update={"last": 1}))}
    )
    base = spec(mesh.pp, mesh.ep, mesh.ep, num_micro_batches(mesh), steps=1)
    node = Machine(devices=mesh.world // mesh.nodes, device=DEVICE, nvlink=1e11, nic=1e10)
    cluster = base.cluster.model_copy(update={"node": node, "nodes": mesh.nodes})
    parallel = base.parallel.model_copy(update={"route": "nodes" if mesh.nodes > 1 else base.parallel.route})
    settings = {"model": reduced, "cluster": cluster, "parallel": parallel, "precision": BUILT_IN[mesh.precision]}
    return base.model_copy(update=settings)


MESHES = {
    "four": Mesh(2, 2, "bf16"),
    "two": Mesh(2, 1, "bf16"),
    "alone_fp8": Mesh(1, 1, "fp8_block"),
    "nodes": Mesh(1, 4, "bf16", 2),
}


@pytest.mark.parametrize("name", MESHES)
def test_device_calls_match_the_golden_files(
    name: str, tmp_path: Path, segments: Segments, bless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = MESHES[name]
    mesh_spec = small(mesh)
    assert mesh_spec.row_alignment > 1, "rows are padded, so that one expert rank moves them too"
    write_build(tmp_path / "build", compile_spec(mesh_spec, segments=segments).files)
    monkeypatch.setenv("DSC_OPS", "torch")
    run_module("tests.gpu.device_path", tmp_path, mesh.world)
    check_waits(tmp_path, mesh)
    for rank in range(mesh.world):
        text, golden = (tmp_path / f"rank_{rank}.txt").read_text("utf-8"), GOLDEN / name / f"rank_{rank}.txt"
        if bless:
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(text, "utf-8")
        assert text == golden.read_text("utf-8"), f"what rank {rank} shows its device differs; bless it if it should"


def check_waits(folder: Path, mesh: Mesh) -> None:
    """While a program runs, the host waits for its device once for each MoE layer and micro-batch, and gives it
    nothing for which it waits; with one expert rank it never does."""
    plan = RunPlan.from_json((folder / "build" / "plan.json").read_text("utf-8"))
    outside = ("start", "connect", "step", "read samples", "optimizer", "sum ", "reduce ")  # once a step
    waits = Counter[str]()
    for rank in range(mesh.world):
        kinds_by_action = json.loads((folder / f"rank_{rank}.json").read_text("utf-8"))
        within = {action: kinds for action, kinds in kinds_by_action.items() if not action.startswith(outside)}
        copies = sum(kinds.pop("blocking copy", 0) for kinds in within.values())
        assert copies <= 1, "samples of the first step, which alone asks for them while it runs"
        within = {action: kinds for action, kinds in within.items() if kinds}
        assert all(kinds == {"host waits": 1} for kinds in within.values()), within
        waits.update(re.sub(r"F\d+\.\d+", "F", action) for action in within)
    num_waits = num_micro_batches(mesh) * mesh.ep  # each column of ranks has its own micro-batches
    assert waits == ({f"counts F@{layer.site}": num_waits for layer in plan.moe_layers} if mesh.ep > 1 else {}), waits

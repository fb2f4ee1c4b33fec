"""The emitted program with its emitted kernels, in Triton's interpreter, against the program with reference ops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.schema import BUILT_IN, Dense, Device, HeadDim, Machine, Mla, Model, Precision, Rope, Spec
from dsl.schema.run import Fusion
from tests.runtime.step.specs import MODELS, MOE, model, spec
from tests.runtime.step.test_fp8 import Roundings

ROOT = Path(__file__).parents[4]
Left = dict[str, Tensor]  # results of a step by name


def run(build: Path, out: Path, interpret: bool) -> dict[str, Tensor]:
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.compiler.emit.kernels.program", str(build), str(out)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return load_file(out)


def both(base: Spec, folder: Path, precision: Precision, of: Model, **changes: Any) -> tuple[Left, Left]:
    """Results of a step with reference ops and of one with kernels. Asserts that every kernel file was used."""
    few = Machine(devices=1, device=Device(name="few", memory=4 * 10**9, sms=4))
    cluster = base.cluster.model_copy(update={"node": few})
    update = {"model": of, "precision": precision, "cluster": cluster, **changes}
    files = dict(compile_spec(base.model_copy(update=update)).files)
    write_build(folder / "build", tuple(files.items()))
    plain = run(folder / "build", folder / "plain.safetensors", interpret=False)
    emitted = run(folder / "build", folder / "emitted.safetensors", interpret=True)
    assert plain.pop("files").item() == 0
    assert emitted.pop("files").item() == sum(name.startswith("kernels/") for name in files), "a kernel file unused"
    assert plain.keys() == emitted.keys()
    return plain, emitted


def of_two_layers(of: Model) -> Model:
    """The model with one layer of each kind; more layers would run the same kernels."""
    return of.model_copy(update={"layers": (of.layers[0], of.layers[1].model_copy(update={"last": 1}))})


@pytest.mark.parametrize("documents", ["joined", "masked"])
def test_a_step_with_kernels_is_a_step_with_reference_ops(tmp_path: Path, documents: str) -> None:
    data = spec(1, 1, 1, 2).data.model_copy(update={"documents": documents})
    plain, emitted = both(spec(1, 1, 1, 2), tmp_path, BUILT_IN["fp32"], of_two_layers(MODELS["v3"]), data=data)
    kernels = [path.stem for path in (tmp_path / "build" / "kernels").iterdir() if path.stem.endswith("_documents")]
    assert ["_dgrad_" in name for name in sorted(kernels)] == [True, False] * (documents == "masked")
    for name, expected in plain.items():
        error = (emitted[name] - expected).abs().max().item()
        # sums of at most 72 rows and 61 columns in FP32, in another order: a few units of 2^-24 of the largest element
        assert error <= 2e-5 * max(expected.abs().max().item(), 1e-6), (name, error)


@pytest.mark.parametrize(
    ("num_micro_batches", "kept", "recompute"), [(1, None, ()), (2, "e5m6", ("rmsnorm", "mla_up", "swiglu"))]
)
def test_a_step_in_blocks_of_fp8(
    tmp_path: Path, num_micro_batches: int, kept: str | None, recompute: tuple[str, ...]
) -> None:
    """Kernels are off from float64 as roundings at random are, which bounds what reference ops are off, too."""
    experts = MOE.model_copy(update={"experts": 4, "top_k": 4, "groups": 1, "top_groups": 1, "inner": 128})
    sizes = HeadDim(nope=16, rope=16, value=128)  # a tile wide
    attention = Mla(heads=2, query_rank=32, kv_rank=16, head_dim=sizes, rope=Rope(theta=100.0))
    small_model = model(attention, Dense(inner=128), experts, mtp=True).model_copy(update={"hidden": 64})
    small_model = of_two_layers(small_model)
    precision = BUILT_IN["fp8_block"].model_copy(update={"attention_output": kept})
    base = spec(1, 1, 1, num_micro_batches)
    plain, emitted = both(base, tmp_path, precision, small_model, recompute=recompute)
    update = {"model": small_model, "recompute": recompute, "precision": precision, "unfused": get_args(Fusion)}
    apart = base.model_copy(update=update)
    write_build(tmp_path / "apart", compile_spec(apart).files)
    roundings = Roundings.of(tmp_path / "apart")
    for gradients in (plain, emitted):
        del gradients["loss"]
        roundings.hold(gradients)


@pytest.mark.parametrize("of", ["v3", "together"])
def test_builds_have_kernels_for_context_ranks(of: str) -> None:
    """Attention has one in its forward and in its backward, and kernels.json names them."""
    files = dict(compile_spec(spec(1, 1, 1, 2, of=of, context=2, sequence=8, precision="fp32")).files)
    segments = json.loads(files["kernels.json"])["segments"]
    ops = {
        op["op"]: op
        for segment in segments
        if segment["kind"] == "attend"
        for op in segment["ops"]
        if "attention" in op["op"]
    }
    assert len(ops) == (3 if of == "together" else 2)
    for op in ops.values():
        assert op["kernel"] and f"kernels/{op['kernel']}.py" in files and not op["reason"]

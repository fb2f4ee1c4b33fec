"""Ops that torch computes on a GPU are priced by what its kernels do, named, and refused if they take too long."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiler.cli.main import main
from compiler.emit.kernels import emit_kernel
from compiler.ir import Cost, TorchWork
from compiler.pipeline import compile_spec
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rates_of
from compiler.predict.predict import predict
from compiler.predict.torch_share import LIMIT, SlowOpsError, refuse_slow_ops, torch_shares
from dsl.load import load
from dsl.schema import Spec
from tests.compiler.emit.kernels.shapes import describe

SPECS = Path(__file__).parents[3] / "specs"
HYBRID, COMPRESSED = SPECS / "laptop-hybrid.dsc", SPECS / "laptop-v4.dsc"
DEVICE = {"bf16": "989TFLOPS", "sms": "132", "memory": "80GiB"}
ON_GPUS = ("precision=bf16", *(f"cluster.node.device.{key}={value}" for key, value in DEVICE.items()))


def on_gpus(*overrides: str, file: Path = HYBRID) -> Spec:
    """A hybrid of linear and grouped attention, or attention to compressed entries, on H100s."""
    return load(file, None, [*ON_GPUS, *overrides])


def test_an_op_of_torch_takes_the_time_of_its_products_passes_and_launches() -> None:
    spec = on_gpus("kernels.delta_rule=torch")
    rates = rates_of(spec)
    work = TorchWork(flops=10**12, bytes=3 * 10**9, launches=101, temporary_bytes=0)
    seconds = rates.kernel_s("attention", "delta_rule", Cost(flops=1, bytes=1, on_torch=work), 1)
    products_s = 10**12 / (0.8 * 0.068 * 989e12)
    assert seconds == pytest.approx(products_s + 3e9 / rates.memory_bytes + 100 * rates.launch_s)
    assert rates.kernel_s("attention", "gqa_attention", Cost(flops=1, bytes=1), 1) < 1e-6


def test_cpus_have_no_ops_that_lack_a_kernel() -> None:
    spec = load(HYBRID)
    assert torch_shares(spec, make_plan(spec), rates_of(spec)) == ()


def test_the_share_and_the_temporary_tensors_are_named() -> None:
    prediction = predict(on_gpus("kernels.delta_rule=torch"))
    (share,) = prediction.torch
    assert share.ops == ("delta_rule",) and LIMIT < share.share < 1 and share.is_accepted
    (sentence,) = [text for text in prediction.assumptions if text.startswith("torch computes delta_rule, ")]
    assert f"{share.share:.0%} of the compute" in sentence
    with_kernel, with_library = predict(on_gpus()), predict(on_gpus("kernels.delta_rule=fla"))
    for other in (with_kernel, with_library):
        assert other.torch == () and other.step.seconds < prediction.step.seconds
    memory, without = prediction.ranks[0], with_library.ranks[0]
    assert 0 < memory.peak_bytes - without.peak_bytes <= share.temporary_bytes


def test_a_slow_op_is_refused_with_the_edit_that_accepts_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Keys of 512 columns are wider than those of the kernel of the delta rule."""
    wide = "model.attention.key_dim=512"
    spec = on_gpus(wide)
    with pytest.raises(SlowOpsError, match=r"^torch would take \d+% of the compute for delta_rule"):
        refuse_slow_ops(spec, make_plan(spec), rates_of(spec))
    accepted = on_gpus(wide, "kernels.delta_rule=torch")
    refuse_slow_ops(accepted, make_plan(accepted), rates_of(accepted))
    overrides = [part for override in (*ON_GPUS, wide) for part in ("-s", override)]
    assert main(["compile", str(HYBRID), *overrides, "-o", str(tmp_path / "build")]) == 2
    error = capsys.readouterr().err
    assert "write `kernels { delta_rule = torch }` in the run to accept it" in error
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(
    ("overrides", "has_kernel"),
    [
        ((), True),
        (("precision=fp32",), True),
        (("precision=fp64",), False),
        (("model.attention.head_dim=512",), True),
        (("model.attention.head_dim=512", "precision=fp32"), False),
    ],
)
def test_torch_is_priced_where_the_build_has_no_kernel(overrides: tuple[str, ...], has_kernel: bool) -> None:
    """By the shapes and dtypes of the op, as the choice of kernels decides."""
    spec = on_gpus(*overrides, file=COMPRESSED)
    plan, rates = make_plan(spec), rates_of(spec)
    ops = {op for share in torch_shares(spec, plan, rates) for op in share.ops}
    assert ("compressed_attention" not in ops) == has_kernel
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[spec.precision.compute]
    (width,) = {attention.head_dim for _, attention in spec.model.attentions}
    q, kv, entries = (torch.empty(rows, width, dtype=dtype, device="meta") for rows in (64, 64, 16))
    emitted = emit_kernel("compressed_attention", describe((q, kv, entries, None, None, 64, 1, 8, 4)), 132)
    assert (emitted is not None) == has_kernel


def test_a_spec_that_names_torch_compiles() -> None:
    files = dict(compile_spec(on_gpus("kernels.delta_rule=torch")).files)
    assert '"reason": "the spec names torch for it"' in files["kernels.json"]

"""Ops that torch computes on a GPU are priced by what its kernels do, named, and refused if they take too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.ir import Cost, TorchWork
from compiler.pipeline import compile_spec
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rates_of
from compiler.predict.predict import predict
from compiler.predict.torch_share import LIMIT, SlowOpsError, refuse_slow_ops, torch_shares
from dsl.load import load
from dsl.schema import Spec

HYBRID = Path(__file__).parents[3] / "specs" / "laptop-hybrid.dsc"
DEVICE = {"bf16": "989TFLOPS", "sms": "132", "memory": "80GiB"}
ON_GPUS = ("precision=bf16", *(f"cluster.node.device.{key}={value}" for key, value in DEVICE.items()))


def on_gpus(*overrides: str) -> Spec:
    """A hybrid of linear and grouped attention on one H100, with sequences long enough to fill it."""
    return load(HYBRID, None, [*ON_GPUS, *overrides])


def test_an_op_of_torch_takes_the_time_of_its_products_passes_and_launches() -> None:
    spec = on_gpus()
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
    spec = on_gpus()
    prediction = predict(spec)
    (share,) = prediction.torch
    assert share.ops == ("delta_rule",) and LIMIT < share.share < 1 and not share.is_accepted
    (sentence,) = [text for text in prediction.assumptions if text.startswith("torch computes delta_rule, ")]
    assert f"{share.share:.0%} of the compute" in sentence
    accepted = predict(on_gpus("kernels.delta_rule=torch"))
    assert accepted.torch[0].is_accepted and accepted.step == prediction.step
    with_library = predict(on_gpus("kernels.delta_rule=fla"))
    assert with_library.torch == () and with_library.step.seconds < prediction.step.seconds
    memory, without = prediction.ranks[0], with_library.ranks[0]
    assert 0 < memory.peak_bytes - without.peak_bytes <= share.temporary_bytes


def test_a_slow_op_is_refused_with_the_edits_that_help(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = on_gpus()
    with pytest.raises(SlowOpsError, match=r"^torch would take \d+% of the compute for delta_rule"):
        refuse_slow_ops(spec, make_plan(spec), rates_of(spec))
    for accepted in ("torch", "fla"):
        legal = on_gpus(f"kernels.delta_rule={accepted}")
        refuse_slow_ops(legal, make_plan(legal), rates_of(legal))
    overrides = [part for override in ON_GPUS for part in ("-s", override)]
    assert main(["compile", str(HYBRID), *overrides, "-o", str(tmp_path / "build")]) == 2
    error = capsys.readouterr().err
    assert "write `kernels { delta_rule = fla }` in the run, or `kernels { delta_rule = torch }` to accept it" in error
    assert not (tmp_path / "build").exists()


def test_a_refused_spec_compiles_once_torch_is_accepted() -> None:
    files = dict(compile_spec(on_gpus("kernels.delta_rule=torch")).files)
    assert '"reason": "the spec names torch for it"' in files["kernels.json"]

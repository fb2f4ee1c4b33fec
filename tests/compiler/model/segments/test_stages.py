"""Stages: their exchanges, the distribution of layers over them, and the parameters of a model."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from compiler import ir
from compiler.ir.stage_placement import BIDIRECTIONAL
from compiler.model.segments.interpret import cut
from compiler.plan.blocks import cut_model, model_blocks, model_steps
from compiler.plan.parameters import parameters
from compiler.plan.stages import build_stages
from dsl.schema import Balance, Phase, Spec
from tests.compiler.model.segments.costs import forward_flops
from tests.compiler.model.segments.specs import DENSE, deepseek_v3, mla, moe, quickstart_sized, spec
from tests.reference.config import Config
from tests.reference.model import Reference

# ---------------------------------------------------------------- the split


def test_deepseek_v3_over_sixteen_stages() -> None:
    """Four MoE layers a stage; the ends, with three dense layers or the head and MTP, have one."""
    stages = build_stages(cut_model(deepseek_v3()), 16, BIDIRECTIONAL)
    layers = [
        [step.site for step in stage.steps if isinstance(step, ir.Use) and step.site.endswith(".attention")]
        for stage in stages
    ]
    assert [len(sites) for sites in layers] == [4] * 15 + [2]
    assert layers[0] == [f"L{i}.attention" for i in range(4)] and layers[15] == ["L60.attention", "M0.attention"]


# ---------------------------------------------------------------- wiring


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_stages_are_the_model_in_order(num_stages: int) -> None:
    stages = build_stages(cut_model(spec()), num_stages)
    sites = [step.site for stage in stages for step in stage.steps]
    assert sites == [step.site for step in model_steps(spec())]
    assert [stage.index for stage in stages] == list(range(num_stages))
    for before, after in pairwise(stages):
        assert before.output == after.input and before.output is not None
    assert stages[0].input is None and stages[-1].output is None


@pytest.mark.parametrize("model_spec", [spec(), quickstart_sized()], ids=["small", "quickstart"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_every_value_is_made_once_and_read_once(model_spec: Spec, num_stages: int) -> None:
    """Each value has one producer and one reader, so segments need no gradient sums. Shapes agree at both ends."""
    for stage in build_stages(cut_model(model_spec), num_stages):
        produced: dict[str, tuple] = {b.name: (b.shape, b.dtype) for b in (*stage.loads, *filter(None, [stage.input]))}
        reads: Counter[str] = Counter()
        for step in stage.steps:
            if isinstance(step, ir.Communication):
                reads.update(step.inputs)
                assert [produced[name] for name in step.inputs] == [(b.shape, b.dtype) for b in step.sizes]
                outputs = step.outputs
                names: tuple[str, ...] = tuple(b.name for b in outputs)
            else:
                reads.update(step.inputs)
                assert [produced[name] for name in step.inputs] == [(i.shape, i.dtype) for i in step.segment.inputs]
                outputs, names = cut(step.segment).outputs, step.outputs
            for name, buffer in zip(names, outputs, strict=True):
                assert name not in produced and name.isidentifier()
                produced[name] = (buffer.shape, buffer.dtype)
        reads.update(b.name for b in [stage.output] if b)
        scalars = {value for value, _ in stage.tangents}
        assert all(produced[value] == ((), produced[value][1]) for value in scalars)
        assert reads | Counter(scalars) == Counter(produced.keys())
        assert {value for _, value in stage.records} <= produced.keys()


def test_inputs_and_records_of_the_end_stages() -> None:
    first, last = build_stages(cut_model(spec()), 2)
    assert [b.name for b in first.loads] == ["tokens"]
    assert [b.name for b in last.loads] == ["targets", "mtp_tokens", "mtp_targets"]
    assert dict(first.records) | dict(last.records) == {
        "loss": "loss",
        "mtp_loss": "mtp_loss",
        "sequence_loss L1": "L1_sequence_loss",
        "sequence_loss L2": "L2_sequence_loss",
        "load layers.1": "L1_counts",
        "load layers.2": "L2_counts",
        "load mtp.0": "M0_counts",
    }
    assert dict(first.tangents) | dict(last.tangents) == {
        "loss": "loss",
        "mtp_loss": "mtp",
        "L1_sequence_loss": "sequence_loss L1",
        "L2_sequence_loss": "sequence_loss L2",
    }


def test_without_mtp_and_sequence_loss() -> None:
    quiet = moe(balance=Balance(bias_rate=(Phase(value=0.0),)))
    (stage,) = build_stages(cut_model(spec(layers=(DENSE, quiet), mtp=False)), 1)
    assert [b.name for b in stage.loads] == ["tokens", "targets"]
    assert stage.records == (("loss", "loss"), ("load layers.1", "L1_counts"))
    assert stage.tangents == (("loss", "loss"),)


# ---------------------------------------------------------------- parameters


def test_parameters_of_deepseek_v3() -> None:
    """671B in the main model and 11.6B more in the MTP module (arXiv 2412.19437, abstract and §2.2)."""
    rows = parameters(deepseek_v3())

    def total(prefix: str) -> int:
        return sum(row.num_elements for row in rows if row.name.startswith(prefix))

    assert total("") - total("mtp.") == 671_026_419_200
    assert total("layers.3.attention.") - 7168 == 187_107_328, "without the norm in front"
    assert total("layers.3.ffn.experts.0.") == 44_040_192
    assert total("layers.3.") == 11_507_286_272
    assert total("mtp.") == pytest.approx(11.61e9, rel=1e-3)
    assert sum(row.num_elements for row in rows if row.role == "bias" and row.name.startswith("layers.")) == 58 * 256


@pytest.mark.parametrize(
    "model_spec",
    [
        spec(),
        spec(layers=(moe(shared=2), moe(shared=0)), expert=2),
        spec(layers=(DENSE,), mtp=False),
        spec(attention=mla(query_rank=None)),
    ],
)
def test_names_and_shapes_equal_the_plain_model(model_spec: Spec) -> None:
    reference = Reference(Config.from_plan(model_spec.model.model_dump() | {"sequence": model_spec.train.sequence}))
    rows = parameters(model_spec)
    assert {row.name: row.shape for row in rows} == {n: tuple(t.shape) for n, t in reference.state_dict().items()}
    trained = {name for name, _ in reference.named_parameters()}
    for row in rows:
        assert (row.role == "parameter") == (row.name in trained)
        assert row.decay == (row.role == "parameter" and not row.name.endswith("norm"))
        assert row.init == (
            None if row.name.endswith("norm") else 0.0 if row.role == "bias" else model_spec.model.init_std
        )
        assert (row.expert is not None) == (".experts." in row.name)
        if row.expert is not None:
            assert row.name == row.tensor.replace(".experts.", f".experts.{row.expert}.") and row.num_experts == 8
        else:
            assert row.name == row.tensor


def test_stages_hold_every_tensor() -> None:
    model_spec = spec()
    tensors = {tensor for step in model_steps(model_spec) if isinstance(step, ir.Use) for _, tensor in step.params}
    assert tensors == {row.tensor for row in parameters(model_spec)}


def test_costs_of_blocks_sum_their_segments() -> None:
    model_spec = quickstart_sized()
    _, dense, sparse, *_ = model_blocks(model_spec)
    T, rows = 256, 256 * 4
    routed = 2 * rows * 3 * 256 * 128
    everyone = 2 * T * 256 * (16 + 3 * 128)  # gate and shared expert
    attention = forward_flops(dense) - dict(cut(dense.uses[1].segment).costs)["F"].flops
    assert forward_flops(sparse) - attention == pytest.approx(routed + everyone, rel=0.02)

"""Emitted segments of modules against autograd of the modules themselves, in float64."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from compiler import ir
from compiler.ir.module import Module, WantedModule
from compiler.model.layers import LAYERS, Place
from compiler.model.modules.named import ModuleError
from compiler.model.modules.source import ModuleFiles, RecordedModules, from_json, to_json
from compiler.model.ops.torch_calls import PRODUCTS, torch_flops
from compiler.model.segments.interpret import cut, interpret
from compiler.model.segments.node_costs import works_of
from compiler.model.segments.split import split, taken_nodes, view_nodes
from compiler.plan.spec_files import SpecFiles
from dsl.schema import Custom, CustomAttention, Spec
from runtime.state.state import initial_value
from tests.compiler.model.modules import layers
from tests.compiler.model.segments.running import call, load
from tests.reference.attention import rmsnorm
from tests.runtime.step.specs import MICRO_BATCH, SEQUENCE, spec

HERE = Path(__file__).parent
HIDDEN = 16
FILES = ModuleFiles(HERE)


def place(name: str, precision: str = "fp64", **changes: Any) -> Place:
    """The place of a module of layers.py in a model."""
    plain = spec(1, 1, 1, 2, of="llama", precision=precision)
    model = plain.model.model_copy(update={key: changes.pop(key) for key in ("norm",) if key in changes})
    spec_of: Spec = plain.model_copy(update={"model": model, **changes}).with_files(SpecFiles(modules=FILES))
    text = f"layers.py:{name}"
    if name in layers.FFNS:
        return Place(spec_of, Custom(module=text))
    return Place(spec_of, plain.model.layers[0].ffn, attention=CustomAttention(module=text))


def segment_of(name: str, **changes: Any) -> ir.Segment:
    return LAYERS["dense" if name in layers.FFNS else "attention"].build(place(name, **changes))


def arguments(segment: ir.Segment) -> dict[str, Tensor]:
    """Random parameters, inputs, tangents and accumulators."""
    source = torch.Generator().manual_seed(1)
    shapes = {each.name: each.shape for each in (*segment.params, *segment.inputs)}
    shapes |= {f"g_{each.name}": each.shape for each in segment.params}
    shapes |= {f"d_{each.name}": segment.inputs[0].shape for each in segment.outputs}
    return {name: torch.randn(shape, generator=source, dtype=torch.float64) for name, shape in shapes.items()}


def emitted(segment: ir.Segment, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of F, I and W: outputs, gradients of inputs, and accumulators."""
    whole, functions = cut(segment), load(segment)
    values = {name: tensor.clone() for name, tensor in given.items()}
    for phase in "FIW":
        values |= call(functions, whole, phase, values)
    assert all(torch.equal(values[name], given[name]) for name in given if not name.startswith("g_"))
    return values


def by_autograd(name: str, segment: ir.Segment, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same results from torch for the user's module between its norms."""
    constants = dict(segment.constants)
    leaves = {each.name: given[each.name].clone().requires_grad_() for each in (*segment.params, *segment.inputs)}
    module = getattr(layers, name)(HIDDEN)
    parameters = {each.path.partition("module.")[2]: leaves[each.name] for each in segment.params if each.path}
    assert parameters.keys() == dict(module.named_parameters()).keys()
    h = leaves["h"] + leaves["y"] if name in layers.FFNS else leaves["h"]
    x = rmsnorm(h, leaves.get("norm"), 1e-6)
    shape = (MICRO_BATCH, SEQUENCE, HIDDEN) if name in layers.ATTENTIONS else x.shape
    out = torch.func.functional_call(module, parameters, (x.view(shape),)).reshape(x.shape)
    out = rmsnorm(out, leaves.get("post_norm"), 1e-6) * constants.get("factor", 1.0)
    outputs = (h + out,) if name in layers.FFNS else (h, out)
    tangents = [given[f"d_{each.name}"] for each in segment.outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), tangents)
    names = {each.name: f"g_{each.name}" for each in segment.params}
    result = {each.name: tensor.detach() for each, tensor in zip(segment.outputs, outputs, strict=True)}
    for leaf, gradient in zip(leaves, gradients, strict=True):
        key = names.get(leaf)
        result[key or f"d_{leaf}"] = gradient + given[key] if key else gradient
    return result


def compare(name: str, segment: ir.Segment) -> None:
    given = arguments(segment)
    found, expected = emitted(segment, given), by_autograd(name, segment, given)
    for key, wanted in expected.items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-10, atol=1e-11, msg=f"{key} of {name} differs")


@pytest.mark.parametrize("name", [*layers.FFNS, *layers.ATTENTIONS])
def test_emitted_gradients_equal_autograd(name: str) -> None:
    compare(name, segment_of(name))


@pytest.mark.parametrize(("name", "norm"), [("Shared", "sandwich"), ("GatedAttention", "post"), ("Geglu", "post")])
def test_gradients_behind_other_norms_equal_autograd(name: str, norm: str) -> None:
    compare(name, segment_of(name, norm=norm))


@pytest.mark.parametrize(("name", "again"), [("Geglu", "dense"), ("GatedAttention", "attention")])
def test_a_whole_module_is_computed_again(name: str, again: str) -> None:
    """The backward keeps less, and gives the same bits."""
    kept, repeated = segment_of(name), segment_of(name, recompute=("rmsnorm", again))
    given = arguments(kept)
    one, other = emitted(kept, given), emitted(repeated, given)
    assert all(torch.equal(one[key], other[key]) for key in one.keys() & other.keys() if key[:2] in ("g_", "d_"))
    saved = [sum(each.fixed_bytes for each in cut(segment).saved) for segment in (kept, repeated)]
    assert saved[1] < saved[0]


def test_the_cut_saves_only_what_the_backward_reads() -> None:
    """F saves the operands of gradients and no masks, W reads no weights, and I defers gradients for weights."""
    segment = segment_of("GatedAttention")
    whole = cut(segment)
    assert not {each.name for each in segment.params} & {*whole.W.args}
    assert "bool" not in {each.dtype for each in whole.saved} and whole.deferred
    joint = interpret(segment)
    views = view_nodes(joint)
    assert not {each.name for each in (*whole.saved, *whole.deferred)} & views.keys()
    assert {node.op for node in split(joint).W if node.op.startswith("aten.mm")} == {"aten.mm.default"}


def flops_of(name: str) -> int:
    """FLOPs of the products and convolutions of a module's graph."""
    role = "ffn" if name in layers.FFNS else "attention"
    wanted = WantedModule(f"layers.py:{name}", role, MICRO_BATCH, SEQUENCE, HIDDEN, "float32", "float32")
    module = FILES.module(wanted)
    shapes = {value: shape for value, shape, _ in module.tensors}
    found = 0
    for node in (*module.forward, *module.backward):
        if node.op in PRODUCTS or "convolution" in node.op:
            found += torch_flops(node.op, *([shapes[value] for value in side] for side in (node.reads, node.outputs)))
    return found


@pytest.mark.parametrize("name", [name for name in (*layers.FFNS, *layers.ATTENTIONS) if name != "Convolution"])
def test_flops_equal_those_that_torch_counts(name: str) -> None:
    x = torch.randn(MICRO_BATCH * SEQUENCE, HIDDEN, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        y = getattr(layers, name)(HIDDEN)(x if name in layers.FFNS else x.view(MICRO_BATCH, SEQUENCE, HIDDEN))
        y.sum().backward()
    assert flops_of(name) == counter.get_total_flops() > 0


def test_values_without_tensor_inputs_are_computed_in_each_function_that_reads_them() -> None:
    """Once per function, with the bytes written; views cost nothing."""
    joint = interpret(segment_of("LinearAttention"))
    apart = {node.outputs[0]: node.op for node in joint.nodes if node.outputs[0] in taken_nodes(joint)}
    found = [(phase, node.outputs[0], works) for phase, node, works in works_of(joint)]
    made = ["aten.arange", "aten.clamp", "aten.ge", "aten.scalar_tensor", "aten.sub", "aten._to_copy"]
    for phase, ops in (("F", made), ("I", made), ("W", [])):
        names = [
            apart[name].rpartition(".")[0] for node_phase, name, _ in found if node_phase == phase and name in apart
        ]
        assert sorted(names) == sorted(ops)
    assert all(works[0][1].bytes > 0 for _, name, works in found if name in apart)


def test_flops_of_a_convolution_count_its_groups() -> None:
    """Torch's counter counts the weight gradient of a grouped convolution like that of an ungrouped one."""
    tokens = MICRO_BATCH * SEQUENCE
    along, across = 2 * tokens * HIDDEN * 3, 2 * tokens * HIDDEN * HIDDEN
    assert flops_of("Convolution") == 3 * (along + across)


def test_a_graph_is_read_back_from_a_build() -> None:
    for name in (*layers.FFNS, *layers.ATTENTIONS):
        segment_of(name)
    recorded = from_json(to_json(FILES.traced.items()))
    for wanted, module in FILES.traced.items():
        assert recorded.module(wanted) == module and recorded.module(wanted).digest == module.digest


def test_a_build_has_modules_only_at_its_own_sizes() -> None:
    wanted = WantedModule("own.py:Geglu", "ffn", 2, 8, 64, "float32", "float32")
    module = Module.__new__(Module)
    recorded = RecordedModules({wanted: module})
    assert recorded.module(wanted) is module
    with pytest.raises(ModuleError, match="in float32, for 24 tokens; the build has float32, 16 tokens"):
        recorded.module(replace(wanted, sequences=3))
    with pytest.raises(ModuleError, match="the build has nothing"):
        recorded.module(replace(wanted, text="own.py:Other"))


def test_initial_values_are_constant_or_random() -> None:
    """A number is the module's; a random parameter has the model's deviation, and matrices decay."""
    params = {each.path: each for name in ("Geglu", "Shared") for each in segment_of(name).params}
    std = spec(1, 1, 1, 2, of="llama").model.init_std
    assert params["ffn.module.gain"].init is None and params["ffn.module.scale"].init == 0.0
    slope = params["ffn.module.slope"]
    first = initial_value(1, "slope", slope.shape, slope.init, mean=slope.mean)
    assert torch.equal(first, torch.full((2 * HIDDEN,), 0.75))
    assert params["ffn.module.up.weight"].init == params["ffn.module.up.bias"].init == std
    assert params["ffn.module.up.weight"].decay and not params["ffn.module.up.bias"].decay


@pytest.mark.parametrize(
    ("was", "hostile"),
    [
        ('"aten.mm.default"', '"aten.mm.default(x, x); import os"'),
        ('"%"', "\"__import__('os')\""),
        ('"%"', f'"{"-" * 90_000}1"'),
        ('"torch.float64"', '"torch.float64 if print() else 0"'),
        ('"p_up_weight"', '"p = 1"'),
        ('"up.weight"', '"up weight"'),
    ],
)
def test_a_graph_of_a_build_has_no_other_text(was: str, hostile: str) -> None:
    """It is printed into a segment that runs: names, ops and quoted texts are all that it may have."""
    for name in ("Geglu", "LinearAttention"):
        segment_of(name)
    text = to_json(FILES.traced.items())
    assert was in text
    with pytest.raises(ModuleError, match=re.escape("modules.json cannot be read")):
        from_json(text.replace(was, hostile))

"""Compare the emitted segments of user modules with autograd on the modules, in float64."""

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
from compiler.model.segments.split import duplicated_nodes, split, view_nodes
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


def place(name: str, precision: str = "fp64", modules: ModuleFiles = FILES, **changes: Any) -> Place:
    """The place of a module of layers.py in a model."""
    plain = spec(1, 1, 1, 2, of="llama", precision=precision)
    model = plain.model.model_copy(update={key: changes.pop(key) for key in ("norm",) if key in changes})
    spec_of: Spec = plain.model_copy(update={"model": model, **changes}).with_files(SpecFiles(modules=modules))
    text = f"layers.py:{name}"
    if name in layers.FFNS:
        return Place(spec_of, Custom(module=text))
    return Place(spec_of, plain.model.layers[0].ffn, attention=CustomAttention(module=text))


def segment_of(name: str, **changes: Any) -> ir.Segment:
    return LAYERS["dense" if name in layers.FFNS else "attention"].build(place(name, **changes))


def arguments(segment: ir.Segment) -> dict[str, Tensor]:
    """Random parameters, inputs, tangents and accumulators."""
    source = torch.Generator().manual_seed(1)
    shapes = {argument.name: argument.shape for argument in (*segment.params, *segment.inputs)}
    shapes |= {f"g_{param.name}": param.shape for param in segment.params}
    shapes |= {f"d_{output.name}": segment.inputs[0].shape for output in segment.outputs}
    return {name: torch.randn(shape, generator=source, dtype=torch.float64) for name, shape in shapes.items()}


def run_emitted(segment: ir.Segment, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run F, I and W. Return outputs, gradients of inputs, and accumulators; assert that no input was changed."""
    segment_cut, functions = cut(segment), load(segment)
    values = {name: tensor.clone() for name, tensor in given.items()}
    for phase in "FIW":
        values |= call(functions, segment_cut, phase, values)
    assert all(torch.equal(values[name], given[name]) for name in given if not name.startswith("g_"))
    return values


def by_autograd(name: str, segment: ir.Segment, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the same results with autograd, for the module with the norms before and after it."""
    constants = dict(segment.constants)
    leaves = {
        argument.name: given[argument.name].clone().requires_grad_() for argument in (*segment.params, *segment.inputs)
    }
    module = getattr(layers, name)(HIDDEN)
    parameters = {param.path.partition("module.")[2]: leaves[param.name] for param in segment.params if param.path}
    assert parameters.keys() == dict(module.named_parameters()).keys()
    h = leaves["h"] + leaves["y"] if name in layers.FFNS else leaves["h"]
    x = rmsnorm(h, leaves.get("norm"), 1e-6)
    shape = (MICRO_BATCH, SEQUENCE, HIDDEN) if name in layers.ATTENTIONS else x.shape
    out = torch.func.functional_call(module, parameters, (x.view(shape),)).reshape(x.shape)
    out = rmsnorm(out, leaves.get("post_norm"), 1e-6) * constants.get("factor", 1.0)
    outputs = (h + out,) if name in layers.FFNS else (h, out)
    tangents = [given[f"d_{output.name}"] for output in segment.outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), tangents)
    names = {param.name: f"g_{param.name}" for param in segment.params}
    result = {output.name: tensor.detach() for output, tensor in zip(segment.outputs, outputs, strict=True)}
    for leaf, gradient in zip(leaves, gradients, strict=True):
        key = names.get(leaf)
        result[key or f"d_{leaf}"] = gradient + given[key] if key else gradient
    return result


def compare(name: str, segment: ir.Segment) -> None:
    operands = arguments(segment)
    results, expected = run_emitted(segment, operands), by_autograd(name, segment, operands)
    for key, wanted in expected.items():
        torch.testing.assert_close(results[key], wanted, rtol=1e-10, atol=1e-11, msg=f"{key} of {name} differs")


@pytest.mark.parametrize("name", [*layers.FFNS, *layers.ATTENTIONS])
def test_emitted_gradients_equal_autograd(name: str) -> None:
    compare(name, segment_of(name))


@pytest.mark.parametrize(("name", "norm"), [("Shared", "sandwich"), ("GatedAttention", "post"), ("Geglu", "post")])
def test_gradients_with_post_and_sandwich_norms_equal_autograd(name: str, norm: str) -> None:
    compare(name, segment_of(name, norm=norm))


@pytest.mark.parametrize(("name", "recomputed_part"), [("Geglu", "dense"), ("GatedAttention", "attention")])
def test_recomputing_a_module_saves_memory_and_changes_no_bit(name: str, recomputed_part: str) -> None:
    plain, repeated = segment_of(name), segment_of(name, recompute=("rmsnorm", recomputed_part))
    operands = arguments(plain)
    plain_results, repeated_results = run_emitted(plain, operands), run_emitted(repeated, operands)
    assert all(
        torch.equal(plain_results[key], repeated_results[key])
        for key in plain_results.keys() & repeated_results.keys()
        if key[:2] in ("g_", "d_")
    )
    saved = [sum(buffer.fixed_bytes for buffer in cut(segment).saved) for segment in (plain, repeated)]
    assert saved[1] < saved[0]


def test_the_cut_saves_only_what_the_backward_reads() -> None:
    """F saves the operands of gradients and no masks, W reads no weights, and I defers gradients for weights."""
    segment = segment_of("GatedAttention")
    segment_cut = cut(segment)
    assert not {param.name for param in segment.params} & {*segment_cut.W.args}
    assert "bool" not in {buffer.dtype for buffer in segment_cut.saved} and segment_cut.deferred
    joint = interpret(segment)
    views = view_nodes(joint)
    assert not {buffer.name for buffer in (*segment_cut.saved, *segment_cut.deferred)} & views.keys()
    assert {node.op for node in split(joint).W if node.op.startswith("aten.mm")} == {"aten.mm.default"}


def flops_of(name: str) -> int:
    """FLOPs of the products and convolutions of a module's graph."""
    role = "ffn" if name in layers.FFNS else "attention"
    wanted = WantedModule(f"layers.py:{name}", role, MICRO_BATCH, SEQUENCE, HIDDEN, "float32", "float32")
    module = FILES.module(wanted)
    shapes = {value: shape for value, shape, _ in module.tensors}
    flops = 0
    for node in (*module.forward, *module.backward):
        if node.op in PRODUCTS or "convolution" in node.op:
            flops += torch_flops(node.op, *([shapes[value] for value in side] for side in (node.reads, node.outputs)))
    return flops


@pytest.mark.parametrize("name", [name for name in (*layers.FFNS, *layers.ATTENTIONS) if name != "Convolution"])
def test_flops_equal_those_that_torch_counts(name: str) -> None:
    x = torch.randn(MICRO_BATCH * SEQUENCE, HIDDEN, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        y = getattr(layers, name)(HIDDEN)(x if name in layers.FFNS else x.view(MICRO_BATCH, SEQUENCE, HIDDEN))
        y.sum().backward()
    assert flops_of(name) == counter.get_total_flops() > 0


def test_values_without_tensor_inputs_are_computed_in_each_function_that_reads_them() -> None:
    """Each function computes such a value once, at the cost of the bytes it writes; views cost nothing."""
    joint = interpret(segment_of("LinearAttention"))
    op_by_value = {node.outputs[0]: node.op for node in joint.nodes if node.outputs[0] in duplicated_nodes(joint)}
    entries = [(phase, node.outputs[0], works) for phase, node, works in works_of(joint)]
    computed = ["aten.arange", "aten.clamp", "aten.ge", "aten.scalar_tensor", "aten.sub", "aten._to_copy"]
    for phase, ops in (("F", computed), ("I", computed), ("W", [])):
        names = [
            op_by_value[name].rpartition(".")[0]
            for node_phase, name, _ in entries
            if node_phase == phase and name in op_by_value
        ]
        assert sorted(names) == sorted(ops)
    assert all(works[0][1].bytes > 0 for _, name, works in entries if name in op_by_value)


def test_flops_of_a_convolution_count_its_groups() -> None:
    """The expected FLOPs are computed here, because torch's counter ignores groups in the weight gradient of a
    convolution."""
    tokens = MICRO_BATCH * SEQUENCE
    convolution_flops, linear_flops = 2 * tokens * HIDDEN * 3, 2 * tokens * HIDDEN * HIDDEN
    assert flops_of("Convolution") == 3 * (convolution_flops + linear_flops)


def test_a_graph_is_read_back_from_a_build() -> None:
    modules = ModuleFiles(HERE)
    for name in (*layers.FFNS, *layers.ATTENTIONS):
        segment_of(name, modules=modules)
    recorded = from_json(to_json(modules.traced.items()))
    for wanted, module in modules.traced.items():
        assert recorded.module(wanted) == module and recorded.module(wanted).digest == module.digest


def test_a_module_that_the_build_lacks_is_refused() -> None:
    wanted = WantedModule("own.py:Geglu", "ffn", 2, 8, 64, "float32", "float32")
    module = Module.__new__(Module)
    recorded = RecordedModules({wanted: module})
    assert recorded.module(wanted) is module
    with pytest.raises(ModuleError, match="in float32, for 24 tokens; the build has float32, 16 tokens"):
        recorded.module(replace(wanted, sequences=3))
    with pytest.raises(ModuleError, match="the build has nothing"):
        recorded.module(replace(wanted, text="own.py:Other"))


def test_initial_values_are_constant_or_random() -> None:
    """A constant parameter keeps its value; a random one is drawn with the model's init_std; only matrices have weight
    decay."""
    params = {param.path: param for name in ("Geglu", "Shared") for param in segment_of(name).params}
    std = spec(1, 1, 1, 2, of="llama").model.init_std
    assert params["ffn.module.gain"].init is None and params["ffn.module.scale"].init == 0.0
    slope = params["ffn.module.slope"]
    first = initial_value(1, "slope", slope.shape, slope.init, mean=slope.mean)
    assert torch.equal(first, torch.full((2 * HIDDEN,), 0.75))
    assert params["ffn.module.up.weight"].init == params["ffn.module.up.bias"].init == std
    assert params["ffn.module.up.weight"].decay and not params["ffn.module.up.bias"].decay


@pytest.mark.parametrize(
    ("original", "hostile"),
    [
        ('"aten.mm.default"', '"aten.mm.default(x, x); import os"'),
        ('"%"', "\"__import__('os')\""),
        ('"%"', f'"{"-" * 90_000}1"'),
        ('"torch.float64"', '"torch.float64 if print() else 0"'),
        ('"p_up_weight"', '"p = 1"'),
        ('"up.weight"', '"up weight"'),
    ],
)
def test_code_in_the_modules_file_is_refused(original: str, hostile: str) -> None:
    """The graph is printed into a segment that runs, so it may contain only names, ops and quoted strings."""
    for name in ("Geglu", "LinearAttention"):
        segment_of(name)
    text = to_json(FILES.traced.items())
    assert original in text
    with pytest.raises(ModuleError, match=re.escape("modules.json cannot be read")):
        from_json(text.replace(original, hostile))

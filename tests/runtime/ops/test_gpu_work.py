"""The formulas for what torch does on a GPU, compared with a count of every kernel of the op on the meta device."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from triton.runtime.jit import JITFunction

from compiler.emit.kernels import emit_kernel
from compiler.model.ops import GRADIENTS, RULES, Rule
from compiler.model.ops.gpu_work import KERNEL_WORK, TORCH_WORK, TorchWork
from compiler.model.ops.kernel_shapes import TAKES
from runtime.ops import OPS
from tests.compiler.emit.kernels.gate_launch import load
from tests.compiler.emit.kernels.shapes import describe

_WITHOUT_WORK = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}


class _WorkCount(TorchDispatchMode):
    """Adds up what the kernels of a call read, write and allocate. Views and empty tensors take no kernel."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.flops = self.bytes = self.launches = self.peak_bytes = self._bytes = 0
        given = [argument.untyped_storage() for argument in arguments if isinstance(argument, Tensor)]
        self._storages = {storage._cdata: 0 for storage in given}  # views of arguments allocate nothing

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        results = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        for tensor in results:
            self._note_storage(tensor)
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in op._schema.returns)
        if is_view or op._schema.name in _WITHOUT_WORK:
            return result
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)] + results
        self.launches += 1
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if op._schema.name in ("aten::baddbmm_", "aten::addmm_"):  # missing in the registry
            self.flops += 2 * args[1].numel() * args[2].shape[-1]
        elif op._overloadpacket in flop_registry:
            self.flops += flop_registry[op._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result

    def _note_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.nbytes()
            self._bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, storage: int) -> None:
        self._bytes -= self._storages.pop(storage)


def _counted(op: str, arguments: tuple[Any, ...]) -> TorchWork:
    with _WorkCount(arguments) as counted:
        result = OPS[op](*arguments)
    del result
    return TorchWork(counted.flops, counted.bytes, counted.launches, counted.peak_bytes)


def _extents(op: str, arguments: tuple[Any, ...]) -> SimpleNamespace:
    rule = RULES.get(op) or GRADIENTS[op]
    names = rule.args if isinstance(rule, Rule) else rule.reads
    shapes = (tuple(argument.shape) if isinstance(argument, Tensor) else argument for argument in arguments)
    return SimpleNamespace(**dict(zip(map(str, names), shapes, strict=False)))


class _Unlaunched:
    """In the place of a Triton kernel: launching it does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: None


def _kept_by_kernels(op: str, arguments: tuple[Any, ...], folder: Path) -> int:
    """The most bytes that the kernels of an op keep at a time, besides its results."""
    file = emit_kernel(op, describe(arguments), 132)
    assert file
    module = load(file, folder)
    for name in [name for name, value in vars(module).items() if isinstance(value, JITFunction)]:
        setattr(module, name, _Unlaunched())
    with _WorkCount(arguments) as counted:
        results = getattr(module, op)(*arguments)
    return counted.peak_bytes - sum(result.untyped_storage().nbytes() for result in tree_leaves(results))


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> Tensor:
    return _tensor(*shape, dtype=torch.int32)


def _float32(*shape: int) -> Tensor:
    return _tensor(*shape, dtype=torch.float32)


def _selection(B: int, S: int, H: int, C: int, K: int, rate: int, Q: int = 0) -> tuple[Any, ...]:
    T = B * (Q or S)
    places = (None, _int32(T)) if Q else ()
    return (_tensor(T, H * C), _tensor(B * (S // rate), C), _float32(T, H), S, H, K, rate, *places)


def _chosen(B: int, S: int, H: int, K: int, Q: int = 0) -> tuple[Any, ...]:
    T = B * (Q or S)
    latent = _tensor(T, H * 192), _tensor(B * S, H * 256), _tensor(B * S, 64)
    return (*latent, _int32(T, K), S, H, 128, 64, 128)


def _chosen_gradient(B: int, S: int, H: int, K: int, Q: int = 0) -> tuple[Any, ...]:
    q, kv, k_rope, chosen, *sizes = _chosen(B, S, H, K, Q)
    o = _tensor(len(q), H * 128)
    return (o, q, kv, k_rope, o, _float32(B, H, Q or S), chosen, *sizes)


def _loss(B: int, S: int, H: int, K: int | None, rate: int, Q: int = 0) -> tuple[Any, ...]:
    q, k, weights, _, heads, *_ = _selection(B, S, 64, 128, 1, rate, Q)
    attention = (_tensor(len(q), H * 512), None, _tensor(len(k), 512))
    if rate == 1:
        attention = _tensor(len(q), H * 192), _tensor(len(k), H * 256), _tensor(len(k), 64)
    places = (None, _int32(len(q))) if Q else ()
    chosen = None if K is None else _int32(len(q), K)
    return (q, k, weights, *attention, chosen, S, heads, H, 128 if rate == 1 else 0, rate, *places)


def _windows(B: int, S: int, H: int, C: int, rate: int, K: int, window: int = 128) -> tuple[Any, ...]:
    T, chosen = B * S, _int32(B * S, K) if K else None
    tensors = _tensor(T, H * C), _tensor(T, C), _tensor(B * (S // rate), C)
    return (*tensors, chosen, _tensor(H), S, H, window, rate)


def _windows_gradient(B: int, S: int, H: int, C: int, rate: int, K: int, window: int = 128) -> tuple[Any, ...]:
    q, kv, entries, chosen, _, *sizes = _windows(B, S, H, C, rate, K, window)
    return (q, q, kv, entries, chosen, q, _float32(B, 1, S, H), *sizes)


def _delta(T: int, S: int, key_heads: int, by_column: bool) -> tuple[Any, ...]:
    heads, width = 32, 128
    q, decay = _tensor(T, key_heads * width), _float32(T, heads * (width if by_column else 1))
    return (q, q, _tensor(T, heads * width), _float32(T, heads), decay, S, key_heads)


def _delta_gradient(T: int, S: int, key_heads: int, by_column: bool) -> tuple[Any, ...]:
    arguments = _delta(T, S, key_heads, by_column)
    return (arguments[2], *arguments)


CASES = {
    "select_keys": [
        _selection(1, 4096, 64, 128, 2048, 1),
        _selection(2, 16384, 64, 128, 2048, 1),
        _selection(1, 65536, 64, 128, 2048, 1, Q=4096),
        _selection(1, 8192, 64, 128, 512, 4),
    ],
    "chosen_attention": [_chosen(1, 4096, 16, 2048), _chosen(2, 4096, 32, 2048), _chosen(1, 65536, 32, 2048, Q=4096)],
    "chosen_attention_dgrad": [
        _chosen_gradient(1, 4096, 16, 2048),
        _chosen_gradient(2, 4096, 32, 2048),
        _chosen_gradient(1, 65536, 32, 2048, Q=4096),
    ],
    "indexer_loss": [
        _loss(1, 4096, 16, 2048, 1),
        _loss(1, 16384, 16, None, 1),
        _loss(1, 65536, 32, 2048, 1, Q=4096),
        _loss(1, 8192, 64, 512, 4),
        _loss(1, 8192, 128, 512, 4),
    ],
    "compressed_attention": [
        _windows(1, 4096, 64, 512, 4, 512),
        _windows(1, 4096, 64, 512, 128, 0),
        _windows(2, 4096, 64, 512, 4, 512),
        _windows(1, 16384, 64, 512, 4, 512),
        _windows(1, 8192, 16, 256, 16, 0, window=256),
    ],
    "compressed_attention_dgrad": [
        _windows_gradient(1, 4096, 64, 512, 4, 512),
        _windows_gradient(1, 4096, 64, 512, 128, 0),
        _windows_gradient(2, 4096, 64, 512, 4, 512),
        _windows_gradient(1, 16384, 64, 512, 4, 512),
        _windows_gradient(1, 8192, 16, 256, 16, 0, window=256),
    ],
    "delta_rule": [_delta(4096, 4096, 16, False), _delta(16384, 16384, 16, False), _delta(8192, 4096, 32, True)],
    "delta_rule_dgrad": [
        _delta_gradient(4096, 4096, 16, False),
        _delta_gradient(16384, 16384, 16, False),
        _delta_gradient(8192, 4096, 32, True),
    ],
}


def test_each_formula_has_cases() -> None:
    assert CASES.keys() == TORCH_WORK.keys()


def test_an_op_that_torch_may_compute_has_the_work_and_the_shapes_of_its_kernel() -> None:
    """A plan takes an op without work of kernels for one that torch computes."""
    assert TORCH_WORK.keys() == KERNEL_WORK.keys() == TAKES.keys()


EACH_CASE = [(op, index) for op, cases in CASES.items() for index in range(len(cases))]


@pytest.mark.parametrize(("op", "index"), EACH_CASE)
def test_kernels_keep_the_bytes_that_plans_count(op: str, index: int, tmp_path: Path) -> None:
    arguments = CASES[op][index]
    formula = KERNEL_WORK[op](_extents(op, arguments))
    assert _kept_by_kernels(op, arguments, tmp_path) == pytest.approx(formula.temporary_bytes, rel=0.2, abs=2**20)


@pytest.mark.parametrize(("op", "index"), EACH_CASE)
def test_a_formula_is_within_a_fifth_of_the_count(op: str, index: int) -> None:
    arguments = CASES[op][index]
    counted, formula = _counted(op, arguments), TORCH_WORK[op](_extents(op, arguments))
    assert formula.flops == pytest.approx(counted.flops, rel=0.05)
    assert formula.bytes == pytest.approx(counted.bytes, rel=0.2)
    assert formula.launches == pytest.approx(counted.launches, rel=0.2)
    assert counted.temporary_bytes <= 1.2 * formula.temporary_bytes
    assert formula.temporary_bytes <= 2 * counted.temporary_bytes


def test_losses_without_a_kernel_take_few_launches() -> None:
    """4,096 tokens of DeepSeek-V3's vocabulary: blocks of logits that fit a CPU's cache would take 10,000."""
    logits, targets, numbers = _tensor(4096, 129280), _tensor(4096, dtype=torch.int64), _float32(4096)
    loss = _counted("policy_loss", (logits, targets, *[numbers] * 4, 0.2, 0.2, 0.1, True))
    assert loss.launches < 100

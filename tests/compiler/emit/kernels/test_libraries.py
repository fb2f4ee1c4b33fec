"""Texts that call libraries: compared with the ops, or called on stand-ins that check what a library documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from compiler.emit.kernels import KERNELS, emit_kernel
from compiler.emit.kernels.libraries import LIBRARIES
from compiler.model.ops.gpu_work import TORCH_WORK
from compiler.model.ops.implementations import OPS_OF, TORCH, TRITON
from compiler.pipeline import compile_spec
from dsl.load import load
from dsl.schema.base import words_of
from dsl.schema.kernels import LIBRARY_NAMES, Kernels
from runtime.ops import OPS
from runtime.ops.linear import scaled_product, scales_by_row
from tests.compiler.emit.kernels.shapes import describe

Op = Callable[..., Any]


def _load(tmp_path: Path, op: str, arguments: tuple[Any, ...], library: str) -> Op:
    file = emit_kernel(op, describe(arguments), 4, library)
    assert file is not None and file.library == library
    namespace: dict[str, Any] = {}
    exec(compile(file.source, file.name, "exec"), namespace)
    return namespace[op]


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------- the table


def test_each_key_names_ops_and_each_word_an_implementation_of_them() -> None:
    assert OPS_OF.keys() == Kernels.model_fields.keys() - {"graphs"}
    assert {*LIBRARY_NAMES} == LIBRARIES.keys()
    for key, ops in OPS_OF.items():
        assert {*ops} <= OPS.keys()
        for word in words_of(Kernels, key):
            if word == TRITON:
                assert {*ops} & KERNELS.keys(), key
            elif word == TORCH:
                assert {*ops} & TORCH_WORK.keys(), f"nothing prices torch for {key}"
            else:
                assert {*ops} & LIBRARIES[word].ops.keys(), (key, word)


def test_torch_replaces_a_kernel() -> None:
    x = _random(24, 64, dtype=torch.float32)
    offsets = torch.tensor([24], dtype=torch.int32)
    arguments = describe((x, x[None], offsets))
    assert emit_kernel("grouped_linear", arguments, 4) is not None
    assert emit_kernel("grouped_linear", arguments, 4, TORCH) is None


# ---------------------------------------------------------------- grouped_mm


@pytest.mark.parametrize("sizes", [(16, 24), (0, 40, 0, 3), (1, 1, 1), (128, 0, 65)])
def test_grouped_mm_computes_the_products_of_each_group(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    E, N, K = len(sizes), 48, 32
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, dy, w = _random(sum(sizes), K), _random(sum(sizes), N, seed=1), _random(E, N, K, seed=2)
    for op, rows in (("grouped_linear", x), ("grouped_linear_dgrad", dy)):
        result = _load(tmp_path, op, (rows, w, offsets), "grouped_mm")(rows, w, offsets)
        exact = OPS[op](rows.double(), w.double(), offsets)
        assert result.dtype == torch.bfloat16 and result.is_contiguous()
        # half a unit in the last place of BF16, and FP32 sums of at most 48 products
        magnitude = OPS[op](rows.double().abs(), w.double().abs(), offsets)
        bound = 2.0**-8 * exact.abs() + 48 * 2.0**-24 * magnitude + 1e-30
        assert bool(((result.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(("N", "K", "dtype"), [(48, 32, torch.float32), (44, 32, torch.bfloat16)])
def test_the_kernel_of_the_build_runs_where_grouped_mm_does_not(N: int, K: int, dtype: torch.dtype) -> None:
    x, w, offsets = _random(8, K, dtype=dtype), _random(1, N, K, dtype=dtype), torch.tensor([8], dtype=torch.int32)
    file = emit_kernel("grouped_linear", describe((x, w, offsets)), 4, "grouped_mm")
    assert file is not None and not file.library
    assert file == emit_kernel("grouped_linear", describe((x, w, offsets)), 4)


def test_weight_gradients_stay_in_fp32() -> None:
    acc, rows = _random(1, 48, 32, dtype=torch.float32), _random(8, 48)
    arguments = describe((acc, rows, _random(8, 32), torch.tensor([8], dtype=torch.int32)))
    file = emit_kernel("grouped_linear_wgrad_", arguments, 4, "grouped_mm")
    assert file is not None and not file.library


def test_a_build_lists_the_library_and_compiles_no_launches_of_it() -> None:
    build = compile_spec(load("specs/quickstart.dsc", None, ["precision=bf16", "kernels.grouped_products=grouped_mm"]))
    files = dict(build.files)
    calls = [op for segment in json.loads(files["kernels.json"])["segments"] for op in segment["ops"]]
    library = {op["kernel"] for op in calls if op["op"] in ("grouped_linear", "grouped_linear_dgrad")}
    assert len(library) > 0 and all(name.startswith("grouped_mm_") for name in library)
    assert {f"kernels/{name}.py" for name in library} <= files.keys()
    assert not library & {call["kernel"] for call in json.loads(files["launches.json"])["calls"]}
    assert "grouped_products = grouped_mm" in files["spec.resolved"]
    assert "library: grouped_mm computes grouped_products on GPUs; ranks need the package torch\n" in build.summary


# ---------------------------------------------------------------- flash-linear-attention


def _chunk_rule(by_column: bool) -> Op:
    """`chunk_gated_delta_rule` or `chunk_kda` of flash-linear-attention 0.4, row by row in FP64, with its checks."""

    def rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        (B, S, G, K), (H, V) = q.shape, v.shape[2:]
        assert k.shape == q.shape and v.shape[:2] == (B, S) and H % G == 0
        assert g.shape == ((B, S, H, K) if by_column else (B, S, H)) and beta.shape == (B, S, H)
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and g.dtype == torch.float32
        assert use_qk_l2norm_in_kernel and K <= 256 and (H == G or not by_column)
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        q, k = (normalize(x.double(), dim=-1).repeat_interleave(H // G, dim=2) for x in (q, k))
        decay = g.double().exp() if by_column else g.double().exp()[..., None].expand(-1, -1, -1, K)
        state, rows = q.new_zeros(B, H, K, V), []
        for t in range(S):
            state = state * decay[:, t, :, :, None]
            error = (v[:, t].double() - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None].double()
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], error)
            rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * scale))
        return torch.stack(rows, dim=1).to(v.dtype), None

    return rule


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package `fla` with these two functions alone."""
    names = {"fla": {}, "fla.ops": {}}
    names |= {"fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _chunk_rule(False)}}
    names |= {"fla.ops.kda": {"chunk_kda": _chunk_rule(True)}}
    for name, functions in names.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("G", "H", "by_column"), [(2, 4, False), (2, 2, False), (2, 2, True)])
def test_fla_is_called_for_what_the_op_computes(tmp_path: Path, G: int, H: int, by_column: bool) -> None:
    B, S, K, V = 2, 24, 16, 8
    q, k, v = (_random(B * S, n, seed=seed) for seed, n in enumerate((G * K, G * K, H * V)))
    beta = _random(B * S, H, seed=3)
    decay = -_random(B * S, H * (K if by_column else 1), dtype=torch.float32, seed=4).abs() / 8
    arguments = (q, k, v, beta, decay, S, G)
    do = _random(B * S, H * V, seed=5)
    result = _load(tmp_path, "delta_rule", arguments, "fla")(*arguments)
    gradients = _load(tmp_path, "delta_rule_dgrad", (do, *arguments), "fla")(do, *arguments)
    wide = (*(x.double() for x in (q, k, v, beta, decay)), S, G)
    exact = OPS["delta_rule"](*wide)
    exact_gradients = OPS["delta_rule_dgrad"](do.double(), *wide)
    for found, expected in zip((result, *gradients), (exact, *exact_gradients), strict=True):
        assert found.shape == expected.shape and found.is_contiguous()
        assert float((found.double() - expected).norm() / expected.norm()) < 2.0**-8  # BF16 results of FP64 sums
    assert [x.dtype for x in gradients] == [x.dtype for x in (q, k, v, beta, decay)]


def test_fla_takes_no_documents_and_no_shared_keys_with_decays_by_column() -> None:
    q, v, beta = _random(24, 32), _random(24, 64), _random(24, 4)
    by_column, by_head = _random(24, 64, dtype=torch.float32), _random(24, 4, dtype=torch.float32)
    starts = torch.zeros(24, dtype=torch.int32)

    def library(*arguments: Any) -> str:
        file = emit_kernel("delta_rule", describe(arguments), 4, "fla")
        assert file is not None
        return file.library

    assert library(q, q, v, beta, by_head, 24, 2) == "fla"
    for arguments in ((q, q, v, beta, by_column, 24, 2), (q, q, v, beta, by_head, 24, 2, starts)):
        assert not library(*arguments)  # the kernel of the build stands in


# ---------------------------------------------------------------- cuDNN


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of [B, H, S, C] in FP64, and the logarithm of its denominator [B, H, S, 1]."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q.double() @ k.mT * scale).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_cudnn_attention on CPUs, with the checks of the real one on the meta device."""
    shapes = torch.ops.aten._scaled_dot_product_cudnn_attention(*(x.to("meta") for x in (q, k, v)), *rest, scale=scale)
    assert rest == (None, True, 0.0, True, False)
    o, lse = _softmax_attention(q, k, v, scale)
    results = o.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.float()
    assert [x.shape for x in results] == [x.shape for x in shapes[:2]]
    return (*results, None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None)


def _attend_dgrad(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *state: Any, scale: float
) -> Any:
    """aten::_scaled_dot_product_cudnn_attention_backward likewise."""
    meta = [x.to("meta") for x in (do, q, k, v, o, lse, *state[:2])]
    shapes = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*meta, *state[2:], scale=scale)
    assert state[2:] == (None, None, None, q.shape[2], k.shape[2], 0.0, True)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    exact, exact_lse = _softmax_attention(*inputs, scale)
    assert torch.allclose(lse.double(), exact_lse) and torch.allclose(o.double(), exact, atol=0.02)
    gradients = torch.autograd.grad(exact, inputs, do.double())
    assert [x.shape for x in gradients] == [x.shape for x in shapes]
    return tuple(gradient.to(q.dtype) for gradient in gradients)


@pytest.mark.parametrize(("H", "G", "theta"), [(4, 2, 1e4), (2, 2, 0.0)])
def test_cudnn_is_called_for_what_the_op_computes(tmp_path: Path, H: int, G: int, theta: float) -> None:
    B, S, C = 2, 24, 16
    q, k, v = (_random(B * S, n * C, seed=seed) for seed, n in enumerate((H, G, G)))
    do, sizes = _random(B * S, H * C, seed=3), (S, H, G, theta)
    forward = _load(tmp_path, "gqa_attention", (q, k, v, *sizes), "cudnn")
    forward.__globals__["ATTEND"] = _attend
    o, lse = forward(q, k, v, *sizes)
    backward = _load(tmp_path, "gqa_attention_dgrad", (do, q, k, v, o, lse, *sizes), "cudnn")
    backward.__globals__["ATTEND_DGRAD"] = _attend_dgrad
    gradients = backward(do, q, k, v, o, lse, *sizes)
    wide = [x.double() for x in (q, k, v)]
    exact, exact_lse = OPS["gqa_attention"](*wide, *sizes)
    exact_gradients = OPS["gqa_attention_dgrad"](do.double(), *wide, exact, exact_lse, *sizes)
    for found, expected in zip((o, lse, *gradients), (exact, exact_lse, *exact_gradients), strict=True):
        assert found.shape == expected.shape and found.is_contiguous()
        assert float((found.double() - expected).norm() / expected.norm()) < 2.0**-7  # rotated keys are rounded to BF16


# ---------------------------------------------------------------- FlashAttention-3


def _check_heads(*tensors: Tensor) -> None:
    """FlashAttention-3 takes [B, S, heads, columns] in BF16 with rows that are aligned to 16 bytes."""
    for x in tensors:
        assert x.dim() == 4 and x.dtype == torch.bfloat16 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0
        assert all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0


def _flash_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs in FP64 as [B, heads, S, columns], after the checks of the package."""
    _check_heads(q, k, v)
    (B, S, H, C), (G, V) = q.shape, v.shape[2:]
    assert k.shape == (B, S, G, C) and v.shape[:2] == (B, S) and H % G == 0
    assert V == C or (128 < C <= 192 and 96 < V <= 128) or C <= 64
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in (q, k, v))
    return q, k, v


def _flash_attn() -> ModuleType:
    """The functions of `flash_attn_interface` that texts call, with its names of arguments, in FP64."""

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, causal: bool = False
    ) -> tuple[Tensor, ...]:
        assert causal and softmax_scale is not None
        o, lse = _softmax_attention(*_flash_inputs(q, k, v), softmax_scale)
        return o.detach().transpose(1, 2).to(q.dtype).contiguous(), lse.detach()[..., 0].float(), q[:0], q[:0]

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        deterministic: bool = False,
    ) -> Tensor:
        assert is_causal and deterministic and softmax_scale is not None and max(q.shape[-1], v.shape[-1]) <= 192
        _check_heads(dout, out, dq, dk, dv)
        inputs = _flash_inputs(q, k, v)
        exact, exact_lse = _softmax_attention(*inputs, softmax_scale)
        assert softmax_lse.dtype == torch.float32 and softmax_lse.is_contiguous()
        assert torch.allclose(softmax_lse.double(), exact_lse[..., 0], atol=1e-5)
        assert torch.allclose(out.double(), exact.transpose(1, 2), atol=0.02)
        gradients = torch.autograd.grad(exact, inputs, dout.double().transpose(1, 2))
        for written, gradient in zip((dq, dk, dv), gradients, strict=True):
            assert written.shape == gradient.transpose(1, 2).shape
            written.copy_(gradient.transpose(1, 2))
        return softmax_lse

    module = ModuleType("flash_attn_interface")
    vars(module).update(locals())
    return module


FLASH_CASES: dict[str, tuple[str, tuple[int, ...], tuple[Any, ...]]] = {  # op, columns of its inputs, sizes
    "groups": ("gqa_attention", (64, 32, 32), (24, 4, 2, 1e4)),
    "heads": ("gqa_attention", (32, 32, 32), (24, 2, 2, 0.0)),
    "latent": ("mla_attention", (48, 64, 8), (24, 2, 16, 8, 16, 1e4)),
    "latent_wide": ("mla_attention", (2 * 192, 2 * 256, 64), (24, 2, 128, 64, 128, 1e4)),
    "latent_unrotated": ("mla_attention", (48, 48, 8), (24, 2, 16, 8, 8, 0.0)),
}


@pytest.mark.parametrize("name", FLASH_CASES)
def test_flash_attn_is_called_for_what_the_op_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", _flash_attn())
    op, columns, sizes = FLASH_CASES[name]
    inputs = [_random(48, width, seed=seed) for seed, width in enumerate(columns)]
    o, lse = _load(tmp_path, op, (*inputs, *sizes), "flash_attn")(*inputs, *sizes)
    do = _random(*o.shape, seed=3)
    arguments = (do, *inputs, o, lse, *sizes)
    gradients = _load(tmp_path, f"{op}_dgrad", arguments, "flash_attn")(*arguments)
    wide = [x.double() for x in inputs]
    exact, exact_lse = OPS[op](*wide, *sizes)
    exact_gradients = OPS[f"{op}_dgrad"](do.double(), *wide, exact, exact_lse, *sizes)
    for found, expected in zip((o, lse, *gradients), (exact, exact_lse, *exact_gradients), strict=True):
        assert found.shape == expected.shape and found.is_contiguous()
        assert float((found.double() - expected).norm() / expected.norm()) < 2.0**-7  # rotated keys are rounded to BF16
    assert [x.dtype for x in gradients] == [torch.bfloat16] * 3


def test_the_kernel_of_the_build_runs_where_flash_attn_does_not() -> None:
    def library(op: str, columns: tuple[int, ...], sizes: tuple[Any, ...], dtype: torch.dtype = torch.bfloat16) -> str:
        file = emit_kernel(op, describe((*(_random(48, n, dtype=dtype) for n in columns), *sizes)), 4, "flash_attn")
        return file.library if file else ""

    starts = torch.zeros(48, dtype=torch.int32)
    for op, columns, sizes in FLASH_CASES.values():
        assert library(op, columns, sizes) == "flash_attn"
        assert not library(op, columns, (*sizes, starts)) and not library(op, columns, sizes, torch.float32)
    assert not library("gqa_attention", (512, 256, 256), (24, 2, 1, 1e4))  # its backward would not be deterministic
    assert not library("mla_attention", (2 * 192, 2 * 192, 64), (24, 2, 128, 64, 64, 1e4))  # no kernel for 192 and 64


# ---------------------------------------------------------------- DeepGEMM


def _deep_gemm(sms: list[int]) -> ModuleType:
    """The functions of DeepGEMM 2 that texts call, with the checks that it documents for FP32 scales."""

    def check(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor) -> None:
        (M, K), N = a[0].shape, b[0].shape[-2]
        assert a[0].dtype == b[0].dtype == torch.float8_e4m3fn and a[1].dtype == b[1].dtype == torch.float32
        assert a[1].shape == (M, -(-K // 128)) and b[1].shape[-2:] == (-(-N // 128), -(-K // 128))
        assert a[0].is_contiguous() and b[0].is_contiguous() and b[1].is_contiguous() and d.is_contiguous()
        assert d.shape == (M, N) and d.dtype == torch.bfloat16 and K % 128 == 0 and N % 64 == 0

    def fp8_gemm_nt(a: Any, b: Any, d: Tensor, *, disable_ue8m0_cast: bool) -> None:
        check(a, b, d)
        d.copy_(scaled_product(*a, b[0], scales_by_row(b[1], len(b[0]))))

    def m_grouped_fp8_gemm_nt_contiguous(
        a: Any, b: Any, d: Tensor, m_indices: Tensor, *, disable_ue8m0_cast: bool
    ) -> None:
        check(a, b, d)
        assert m_indices.dtype == torch.int32 and m_indices.shape == (len(d),)
        for first in range(0, len(d), 128):  # a block of rows has one weight
            (expert,) = {*m_indices[first : first + 128].tolist()}
            rows = slice(first, first + 128)
            d[rows] = scaled_product(a[0][rows], a[1][rows], b[0][expert], scales_by_row(b[1][expert], d.shape[1]))

    module = ModuleType("deep_gemm")
    vars(module).update(locals() | {"set_num_sms": sms.append})
    return module


def _fp8(*shape: int, seed: int) -> Tensor:
    return _random(*shape, dtype=torch.float32, seed=seed).to(torch.float8_e4m3fn)


def test_deep_gemm_multiplies_rows_by_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sms: list[int] = []
    monkeypatch.setitem(sys.modules, "deep_gemm", _deep_gemm(sms))
    E, N, K, sizes = 3, 192, 256, (128, 0, 256)
    x, w = _fp8(sum(sizes), K, seed=0), _fp8(E, N, K, seed=1)
    xs = _random(K // 128, sum(sizes), dtype=torch.float32, seed=2).abs().t()  # by columns, as quantising stores them
    ws = _random(E, -(-N // 128), K // 128, dtype=torch.float32, seed=3).abs()
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    calls = {
        "linear_fp8": (x, xs, w[0], ws[0]),
        "linear_fp8_dgrad": (x, xs, w[1], ws[1]),
        "grouped_linear_fp8": (x, xs, w, ws, offsets),
        "grouped_linear_fp8_dgrad": (x, xs, w, ws, offsets),
    }
    for op, arguments in calls.items():
        result, expected = _load(tmp_path, op, arguments, "deep_gemm")(*arguments), OPS[op](*arguments)
        assert torch.equal(result, expected) or torch.allclose(result.float(), expected.float(), rtol=2.0**-7)
    assert sms == [4] * len(calls)
    narrow = describe((x[:, :192].contiguous(), xs, w[0, :, :192].contiguous(), ws[0]))
    file = emit_kernel("linear_fp8", narrow, 4, "deep_gemm")
    assert file is not None and not file.library

"""Rates of specs: classes and shapes of their ops, SMs, peaks, links, cores."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from compiler.ir import Buffer, Use
from compiler.machine.rates import Rates, shipped_table
from compiler.machine.rates.table import FLOPS, MEMORY, RateRow, RateTable, merge_base, shape_at
from compiler.machine.topology.traffic import messages_of
from compiler.model.ops import CASTS, GRADIENTS, RULES, kernel_class
from compiler.plan.actions.chains import Chains
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import RATED, core_rates, rates_of, table_for
from dsl.schema import Kernels, Sm, Spec
from tests.compiler.program.lower.stages import deepseek_v3
from tests.specs.shipped import shipped

V3 = ("deepseek-v3.dsc", "pretrain")
TOKENS, TOP_K, HIDDEN = 4096, 8, 7168
ROWS = (Buffer("rows", ("R", HIDDEN), "bfloat16"),)
EIGHT_BITS = (Buffer("rows", ("R", HIDDEN), "float8_e4m3fn"), Buffer("rows_scales", ("R", HIDDEN // 128), "float32"))


def with_device(spec: Spec, **peaks: float) -> Spec:
    node = spec.cluster.node
    links = {name: value for name, value in peaks.items() if name in ("nvlink", "nic")}
    device = node.device.model_copy(update={k: v for k, v in peaks.items() if k not in links})
    node = node.model_copy(update={"device": device, **links})
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"node": node})})


def exchange_s(rates: Rates, rows: int = 4096, to_experts: bool = True) -> float:
    return rates.fabric.exchange_s(rates.experts, to_experts, EIGHT_BITS if to_experts else ROWS, rows)


# ---------------------------------------------------------------- libraries


def attention_s(rates: Rates, dtype: str = "bf16") -> tuple[float, float]:
    """FLOP/s of grouped-query attention, forward and backward, at no shape in particular."""
    ops = (("attention", "gqa_attention"), ("attention_backward", "gqa_attention_dgrad"))
    forward, backward = (rates.rate(kind, dtype, (), op) for kind, op in ops)
    return forward, backward


def test_a_library_has_its_own_rates() -> None:
    """Rows by a library price its ops alone, where a run names it. Without rows the plan says so."""
    of_kernels, run = shipped("llama3-8b.dsc", "pretrain"), {"attention": "flash_attn"}
    by_flash = of_kernels.model_copy(update={"kernels": Kernels.model_validate(run)})
    plain = shipped_table("h100")
    common = {"dtype": "bf16", "by": "flash_attn", "source": "a test", "date": "2026-11"}
    rows = [{"class": "attention", "rate": 6e14, **common}, {"class": "attention_backward", "rate": 4e14, **common}]
    measured = plain.model_copy(update={"rows": (*plain.rows, *map(RateRow.model_validate, rows))})
    factors = [plain.factor_of(kind, "bf16") for kind in ("attention", "attention_backward")]

    note = "attention by flash_attn takes as long as by the kernels of the build: table h100 has no row by flash_attn"
    assert note in rates_of(by_flash, plain).assumptions
    assert attention_s(rates_of(by_flash, plain)) == attention_s(rates_of(of_kernels, plain))
    assert attention_s(rates_of(of_kernels, measured)) == attention_s(rates_of(of_kernels, plain))
    priced = rates_of(by_flash, measured)
    assert note not in priced.assumptions
    assert attention_s(priced) == pytest.approx([6e14 / factors[0], 4e14 / factors[1]])
    assert attention_s(priced._with_product_share(0.5)) == pytest.approx([3e14 / factors[0], 2e14 / factors[1]])
    assert priced.rate("attention", "bf16", ()) == rates_of(of_kernels, plain).rate("attention", "bf16", ())


def test_rows_by_a_library_leave_those_of_the_base() -> None:
    row = {"class": "attention", "dtype": "bf16", "rate": 6e14, "by": "cudnn", "source": "a test", "date": "2026-11"}
    base = shipped_table("h100")
    mine = {"name": "mine", "base": "h100", "device": {"name": "h100"}, "rows": (RateRow.model_validate(row),)}
    merged = merge_base(RateTable.model_validate(mine))
    assert {r.by for r in merged.rows if r.kind == "attention"} == {None, "cudnn"}
    assert len(merged.rows) == len(base.rows) + 1
    for wrong in ({"by": "cutlass"}, {"class": "norm", "dtype": "any"}):
        with pytest.raises(ValidationError, match="does not run"):
            RateRow.model_validate(row | wrong)


# ---------------------------------------------------------------- ops


def test_every_op_has_a_class() -> None:
    """Each op has a class with rates; no op falls back to a default."""
    for op in {*RULES, *CASTS, *GRADIENTS}:
        assert kernel_class(op) in (*FLOPS, *MEMORY), op
    with pytest.raises(KeyError, match="no_such_op"):
        kernel_class("no_such_op")
    assert [kernel_class(op) for op in ("linear", "linear_dgrad", "linear_wgrad")] == ["gemm", "gemm", "wgrad"]
    assert kernel_class("grouped_linear_wgrad") == "grouped_wgrad"
    assert kernel_class("mla_attention_dgrad") == "attention_backward"
    assert kernel_class("rmsnorm_wgrad") == kernel_class("head_rmsnorm_dgrad") == "norm"


def test_shapes_of_products_are_their_work() -> None:
    """2·m·n·k FLOPs, whichever of its three products a linear is; with groups, of all of them."""
    plan = deepseek_v3().plan
    cuts = plan.cuts
    kinds = set()
    for use in (step for step in plan.stages[5].steps if isinstance(step, Use)):
        for _, cost in cuts[use.site].costs:
            for op, work in cost.ops:
                if (kind := kernel_class(op)) in ("gemm", "wgrad", "grouped_gemm", "grouped_wgrad"):
                    kinds.add(kind)
                    rows = TOKENS * TOP_K
                    assert 2 * prod(shape_at(work.shape, rows)) == work.flops + work.flops_row * rows, (op, work)
    assert len(kinds) == 4


def test_shapes_of_a_layer_by_hand() -> None:
    plan = deepseek_v3().plan
    cuts = plan.cuts
    site = next(step.site for step in plan.stages[5].steps if isinstance(step, Use) and step.site.endswith("experts"))
    shapes = {op: work.shape for _, cost in cuts[site].costs for op, work in cost.ops if "linear" in op}
    assert shapes["grouped_linear"] == (4, "R", 7168, 2048)  # down: the last of the forward
    assert shapes["grouped_linear_dgrad"] == (4, "R", 7168, 4096)  # of the input of gate and up
    assert shapes["grouped_linear_wgrad"] == (4, 4096, 7168, "R")
    assert shape_at(shapes["grouped_linear_wgrad"], 32768) == (4, 4096, 7168, 8192)
    site = site.replace("experts", "attention")
    attention = {op: work.shape for _, cost in cuts[site].costs for op, work in cost.ops if "mla" in op}
    assert set(attention.values()) == {(4096, 4096, 128, 192, 128)} and len(attention) == 2


# ---------------------------------------------------------------- rates


def test_published_shapes_take_published_times() -> None:
    """Down-projection of the shared expert, 4096 rows: 1168 TFLOPS on 132 SMs (DeepGEMM); here 112 of them compute."""
    rates = rates_of(shipped(*V3), "h800")
    assert rates.rate("gemm", "e4m3", (4096, 7168, 2048)) == pytest.approx(1168e12 * 112 / 132)
    assert rates.rate("grouped_gemm", "e4m3", (4, 8192, 4096, 7168)) == pytest.approx(1346e12 * 112 / 132)
    assert 878e12 < rates.rate("wgrad", "e4m3", (4096, 7168, 4096)) * 132 / 112 < 1092e12
    first = rates_of(shipped(*V3), "h800-2025-02")
    assert first.rate("gemm", "e4m3", (4096, 7168, 2048)) == pytest.approx(1025e12 * 112 / 132)


def test_calibrated_tables_are_preferred() -> None:
    """A calibrated table is preferred at every stage of the compiler, which all use the same rates."""
    assert rates_of(shipped(*V3)).table == "h800-calibrated"
    assert rates_of(shipped("moe-8gpu.dsc")).table == "h100"


def test_few_rows_are_slower() -> None:
    rates = rates_of(shipped(*V3), "h800")
    slow, fast = (rates.rate("gemm", "e4m3", (rows, 7168, 16384)) for rows in (100, 4000))
    assert slow < 0.6 * fast


def test_exchanges_of_deepseek_v3() -> None:
    """Four nodes per token; FP8 there, BF16 back; 51 and 50 GB/s on 24 SMs (DeepEP); the spec reserves 20."""
    rates = rates_of(shipped(*V3), "h800")
    dispatch_s, combine_s = (exchange_s(rates, TOKENS * TOP_K, to_experts) for to_experts in (True, False))
    assert dispatch_s == pytest.approx(TOKENS * 4 * 7392 / (51e9 * 20 / 24), rel=0.01)
    assert combine_s == pytest.approx(TOKENS * 4 * 14336 / (50e9 * 20 / 24), rel=0.01)


def test_sms_that_communicate_do_not_compute() -> None:
    spec = shipped(*V3)
    sms_20, sms_24 = rates_of(spec), rates_of(spec.model_copy(update={"sm": Sm(communication=24)}))
    sms_0 = rates_of(spec.model_copy(update={"sm": Sm(communication=0)}))
    for kind, dtype in sms_20.points:
        for (_, rate), (_, full_rate) in zip(sms_20.points[kind, dtype], sms_0.points[kind, dtype], strict=True):
            if kind in FLOPS:
                assert rate == pytest.approx(full_rate * 112 / 132)
            elif kind in MEMORY:
                assert rate == full_rate
    assert exchange_s(sms_24) < exchange_s(sms_20)
    sms_100 = rates_of(spec.model_copy(update={"sm": Sm(communication=100)}))
    assert exchange_s(sms_100) == exchange_s(sms_24), "24 SMs fill the links"


def layer_s(rates: Rates) -> float:
    plan = deepseek_v3().plan
    chains = Chains(plan.stages[5], plan.cuts, rates)
    between = messages_of(rates.fabric, plan, plan.stage_placement).seconds[5, 6]
    return sum(node.time_ns for kind in "FB" for node in chains.chain(kind)) * 1e-9 + between


PEAKS = {"bf16": 989e12, "fp8": 1979e12, "hbm": 3.35e12, "nvlink": 200e9, "nic": 50e9}


@given(st.sampled_from(sorted(PEAKS)), st.floats(1.01, 8.0))
def test_a_faster_device_is_never_slower(name: str, faster: float) -> None:
    spec = shipped(*V3)
    before, after = (layer_s(rates_of(with_device(spec, **{name: PEAKS[name] * f}))) for f in (1.0, faster))
    assert after <= before * (1 + 1e-9)
    if name != "nvlink":  # which the network hides
        assert after < before


def test_an_unknown_accelerator_reaches_the_same_shares_of_its_peaks() -> None:
    spec = shipped(*V3)
    assert table_for(spec.cluster.node.device) == "h800"
    unknown = with_device(spec, name="l40s")  # type: ignore[arg-type]
    rates = rates_of(unknown)
    note = "device l40s has no rate table: it reaches the same shares of its peaks as H100"
    assert rates.table == "h100" and note in rates.assumptions
    twice = rates_of(with_device(unknown, bf16=2 * 989e12, fp8=2 * 1979e12))
    shape = (4096, 7168, 2048)
    assert twice.rate("gemm", "e4m3", shape) == pytest.approx(2 * rates.rate("gemm", "e4m3", shape))


def test_classes_without_rows_are_reported() -> None:
    notes = rates_of(shipped(*V3), "h800").notes.values()
    assert "table h800 has no row of wgrad in bf16: rows of gemm in bf16 stand in" in notes
    table = shipped_table("h800")
    bare = table.model_copy(update={"rows": tuple(row for row in table.rows if row.kind != "attention")})
    attention = rates_of(shipped(*V3), bare)
    assert attention.rate("attention", "bf16", (4096, 4096, 128, 192, 128)) == pytest.approx(0.5 * 989e12 * 112 / 132)
    assert any("no row of attention" in line for line in attention.notes.values())


def test_every_rated_class_has_a_rate() -> None:
    for file in ("quickstart.dsc", "moe-8gpu.dsc", "single-gpu.dsc", "deepseek-v2.dsc"):
        rates = rates_of(shipped(file))
        assert {kind for kind, _ in rates.points} == set(RATED)
        assert all(rate > 0 for points in rates.points.values() for _, rate in points)


def test_within_a_node_nothing_crosses_the_network() -> None:
    rates = rates_of(shipped("moe-8gpu.dsc"))
    assert rates.experts.network_copies == 0 and rates.experts.spread.nodes == 1
    assert exchange_s(rates, 1000) > 0


def test_copies_over_the_network_follow_the_route() -> None:
    """A token has 8 experts: on 4 nodes in DeepSeek-V3, on both nodes of its group in Kimi K2."""
    for file, expected in (("deepseek-v3.dsc", 0.5), ("kimi-k2.dsc", 0.25)):
        spec = shipped(file)
        assert spec.routes_by_nodes and rates_of(spec).experts.network_copies == expected
        flat = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"route": "flat"})})
        assert not flat.routes_by_nodes and rates_of(flat).experts.network_copies == 1
        assert exchange_s(rates_of(flat), 1000) > exchange_s(rates_of(spec), 1000)


def test_one_expert_rank_exchanges_nothing() -> None:
    assert exchange_s(rates_of(shipped("tiny.dsc")), 64) == 0


def test_a_device_without_peaks_is_a_core() -> None:
    rates = rates_of(shipped("quickstart.dsc"))
    assert rates.table == "cpu" and rates.rate("gemm", "fp32", (7, 8, 9)) == 1e11
    assert core_rates().rate("gemm", "fp32", (7, 8, 9)) == 1e11


def test_ranks_that_share_cores_take_no_less_than_their_work() -> None:
    rates = rates_of(shipped("quickstart.dsc"))
    assert rates.makespan_on_shared_cores(1.0, [0.9] * 4) == 1.0, "the shipped table has a core for each"
    table = shipped_table("cpu")
    two_cores = table.model_copy(update={"device": table.device.model_copy(update={"cores": 2})})
    rates = rates_of(shipped("quickstart.dsc"), two_cores)
    assert rates.makespan_on_shared_cores(1.0, [0.9] * 4) == pytest.approx(1.8)
    assert rates.makespan_on_shared_cores(1.0, [0.2] * 4) == 1.0, "ranks that mostly wait leave their core to others"


def test_rope_is_a_separate_pass_if_the_table_has_its_rate() -> None:
    kernels = {}
    for name in ("tiny.dsc", "moe-8gpu.dsc"):
        rates, plan = rates_of(shipped(name)), make_plan(shipped(name))
        work = next(
            work
            for cut in plan.cuts.values()
            for _, cost in cut.costs
            for op, work in cost.ops
            if op == "mla_attention"
        )
        kernels[name] = [kind for kind, _ in rates.kernels_s("attention", "mla_attention", work, 0)]
        assert rates.rope == any(row.kind == "rope" for row in shipped_table(rates.table).rows)
    assert [len(kinds) for kinds in kernels.values()] == [1, 2] and kernels["moe-8gpu.dsc"][1] == "rope"

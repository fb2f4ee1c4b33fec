"""Memory that devices hold throughout, compared with the runtime's allocations and with DeepSeek-V3's report."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import comb

import pytest
import torch

from compiler.emit.build_files import contract_plan
from compiler.pipeline import lower_spec
from compiler.plan.blocks import cut_model
from compiler.plan.experts.spec_placement import layers_with_experts
from compiler.plan.holding import _always
from compiler.plan.plan import make_plan
from compiler.predict.memory import explain_memory, gib, host_buffers, memory_assumptions, overflows, rank_memories
from compiler.predict.memory_state import device_of, proven_memories, quantised_weight_bytes, rank_states
from compiler.predict.predict import predict
from compiler.predict.prediction import HeldTensor, RankMemory
from compiler.program.lower import Lowering
from compiler.schedule.schedule import Schedule
from compiler.tools.report.measured_memory import MeasuredMemory, device_line, summarize_peaks
from dsl.load import load
from dsl.schema import Moe
from runtime.state.state import build_state
from tests.runtime.step.specs import spec as small_spec
from tests.runtime.step.specs import with_copies
from tests.specs.shipped import SPECS, shipped

GIB = 2**30
# A split of DeepSeek-V3's layers that is consistent with the published numbers (the report names none).
PUBLISHED = 'parallel.layout="Et*4|(t*4|)*14tmL"'


MESHES = [(2, 2, 4, "dualpipe"), (1, 4, 4, "1f1b"), (2, 1, 3, "zbv"), (2, 2, 4, "1f1b")]
ALLOCATED = [
    *((*mesh, zero, None) for mesh in MESHES for zero in range(4)),
    *((*mesh, zero, 2) for mesh in ((2, 2, 4, "dualpipe"), (1, 1, 4, "1f1b"), (2, 2, 6, "zbv")) for zero in (2, 3)),
]


@pytest.mark.parametrize(("pp", "ep", "dp", "schedule", "zero", "shard"), ALLOCATED)
def test_equals_the_bytes_that_the_runtime_allocates(
    pp: int, ep: int, dp: int, schedule: str, zero: int, shard: int | None
) -> None:
    """The predicted state equals the runtime's allocation to the byte, on every rank, with any padding of shards."""
    spec = small_spec(pp, ep, dp, 2 * pp, zero=zero, schedule=schedule)
    spec = spec if shard is None else with_copies(spec, shard)
    lowered = lower_spec(spec)
    states = rank_states(spec, lowered.plan)
    plan = contract_plan(spec, lowered, {})
    for rank in range(pp * dp):
        state = build_state(plan, rank, torch.device("cpu"))
        weights = sum(b.parameters.nbytes for b in state.buckets) + sum(b.nbytes for b in state.biases.values())
        gradients = sum(b.gradients.nbytes for b in state.buckets)
        moments = sum(t.nbytes for b in state.buckets for piece in b.owned for t in piece.state.values())
        planned = states[rank // dp]
        assert (planned.weights, planned.gradients, planned.optimizer) == (weights, gradients, moments), rank
    peaks = [c.peak_bytes for c in lowered.certificates.values()]
    for rank, memory in enumerate(proven_memories(spec, lowered.plan, lowered.certificates.values())):
        assert memory.activations == max(peak[rank] for peak in peaks)
        assert memory.total == states[rank].total + memory.activations


def test_eight_bit_copies_of_deepseek_v3() -> None:
    """All of a layer but its norms and its gate, and transposed: 187.1M in attention, a shared expert and four routed
    ones of 44.0M."""
    spec = load(SPECS / "deepseek-v3.dsc", overrides=[PUBLISHED])
    plan = make_plan(spec)
    attention = 187_107_328 - 1536 - 512
    layer = attention + 5 * 44_040_192
    scales = 4 * layer // 128**2 + 4 * 56 // 2  # of the 576 rows of one product, the last 64 fill half a tile
    assert quantised_weight_bytes(plan)[5] == 8 * 2 * (layer + scales)
    assert (
        quantised_weight_bytes(make_plan(shipped("llama3-8b.dsc"))) == (0,) * shipped("llama3-8b.dsc").parallel.pipeline
    )


def test_the_published_set_up_fits() -> None:
    """DeepSeek-V3 on its devices with the recomputation of its report (arXiv 2412.19437, §3.2.3)."""
    spec = load(SPECS / "deepseek-v3.dsc", overrides=[PUBLISHED])
    prediction = predict(spec)
    assert prediction.fits and all(rank.peak_bytes < 79.1 * GIB for rank in prediction.ranks)
    assert any("e4m3" in line for line in prediction.assumptions)
    assert [rank.peak_bytes for rank in prediction.ranks] == [rank.peak_bytes for rank in reversed(prediction.ranks)]
    without = predict(load(SPECS / "deepseek-v3.dsc", overrides=[PUBLISHED, "recompute=[]"]))
    wide = predict(load(SPECS / "deepseek-v3.dsc", overrides=[PUBLISHED, "precision=bf16"]))
    assert not without.fits and not wide.fits


# ---------------------------------------------------------------- why not


def memory(rank: int, **fields: object) -> RankMemory:
    memory_fields: dict[str, object] = {
        "capacity_bytes": 80 * GIB,
        "peak_bytes": 85 * GIB,
        "weights": 20 * GIB,
        "gradients": 25 * GIB,
        "optimizer": 5 * GIB,
        "activations": 30 * GIB,
        "buffers": 5 * GIB,
        "peak_action": "(F3.7|B12.4)",
        "held_tensors": (
            HeldTensor("received_rows", 18 * GIB, "kept"),
            HeldTensor("attention_mla_attention_0", 12 * GIB, "saved"),
            HeldTensor("returned_rows", 5 * GIB, "buffer"),
        ),
    }
    return RankMemory(pp_rank=rank, **(memory_fields | fields))  # type: ignore[arg-type]


def test_explains_why_a_plan_does_not_fit() -> None:
    """Names the fullest rank, the action and the excess; the parts sum up to the total."""
    spec = shipped("deepseek-v3.dsc")
    plan = make_plan(spec)
    ranks = [memory(0, peak_bytes=79 * GIB), memory(1), memory(2, peak_bytes=86 * GIB, weights=21 * GIB), memory(3)]
    lines = explain_memory(spec, plan, ranks, max_tensors=2)
    assert lines == (
        "pipeline rank 2 holds 86.0 GiB at (F3.7|B12.4), 6.0 GiB more than the 73.5 GiB of device h800, besides the "
        "5.6 GiB reserved",
        "pipeline ranks 1, 3 do not fit either",
        "    25.0 GiB  gradients of weights",
        "    21.0 GiB  weights",
        "    18.0 GiB  inputs kept for the backward",
        "    12.0 GiB  saved by forwards",
        "     5.0 GiB  buffers of exchanges",
        "     5.0 GiB  optimizer",
        "the largest values, summed over layers and micro-batches:",
        "    18.0 GiB  received_rows, inputs kept for the backward",
        "    12.0 GiB  attention_mla_attention_0, saved by forwards",
    )
    assert [overflow.pp_rank for overflow in overflows(ranks)] == [2, 1, 3]
    assert sum(part.bytes for part in overflows(ranks)[0].parts) == 86 * GIB
    assert explain_memory(spec, plan, ranks[:1]) == ()


def test_warns_if_a_ranks_memory_differs_from_the_plan() -> None:
    even = (MeasuredMemory(0, 1024, 1024), MeasuredMemory(1, 4096, 4096))
    assert summarize_peaks(even).startswith("4.0 KiB on rank 1; every rank matches the plan")
    line = summarize_peaks((*even, MeasuredMemory(2, 1000, 1024), MeasuredMemory(3, 1050, 1024)))
    assert line == (
        "4.0 KiB on rank 1; 2 of 4 ranks differ from their plan, rank 3 the most: planned 1,050 bytes, measured 1,024"
    )


def test_the_report_compares_devices_with_the_plan() -> None:
    """The report shows the largest value of all rows. A run on CPUs has no such line."""
    peaks = (60, 71, 64)
    ranks = [memory(rank, capacity_bytes=75 * GIB, peak_bytes=peak * GIB) for rank, peak in enumerate(peaks)]
    rows = [{"memory_bytes": used * GIB, "reserved_bytes": (used + 4) * GIB} for used in (65, 70, 70)]
    assert device_line([{}, *rows], ranks) == (
        "70.0 GiB of tensors, planned 71.0 GiB on pipeline rank 1;"
        " 74.0 GiB reserved by the allocator, of 75.0 GiB that plans may use"
    )
    assert device_line([{"process_bytes": GIB}], ranks) is None


def test_sizes_are_printed_in_a_suitable_unit() -> None:
    assert [gib(n) for n in (0, 1023, 1024, 3 * 2**20, 5 * GIB // 2)] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "3.0 MiB", "2.5 GiB",
    ]  # fmt: skip


def test_the_worst_case_is_reported_with_its_probability() -> None:
    """By hand: all tokens of an expert group choose experts of one rank. Of 262,144 tokens nobody waits for that."""
    spec = shipped("deepseek-v3.dsc")
    line = memory_assumptions(spec, make_plan(spec), [memory(0, worst_bytes=900 * GIB)])[-1]
    assert "262,144 tokens" in line and "1,048,576 rows" in line and line.endswith("practically never")
    few = load(SPECS / "quickstart.dsc", None, ["train.sequence=2", "train.micro_batch=1"])
    (ffn,) = {layers.ffn for layers in few.model.layers if isinstance(layers.ffn, Moe)}
    ranks, tokens = few.parallel.expert, 2 * few.parallel.expert_group
    local = ffn.experts // ranks
    chance = ranks * (comb(local, ffn.top_k) / comb(ffn.experts, ffn.top_k)) ** tokens
    line = memory_assumptions(few, make_plan(few), [memory(0, worst_bytes=GIB)])[-1]
    assert line.endswith(f"in {chance:.1g} of the layers"), line
    dense = shipped("llama3-8b.dsc")
    assert len(memory_assumptions(dense, make_plan(dense), [memory(0, worst_bytes=900 * GIB)])) == 1


def test_each_rank_has_the_memory_of_its_device() -> None:
    """In a cluster of several kinds of nodes, a rank has the memory of its own device."""
    spec = shipped("moe-8gpu.dsc")
    plan = make_plan(spec)
    assert {device_of(spec, plan, rank).name for rank in range(plan.mesh.pp)} == {spec.cluster.node.device.name}


@pytest.mark.parametrize("zero", range(4))
def test_memory_of_layers_before_planning(zero: int) -> None:
    """Equals the planned memory to the byte, except for router biases, if buckets need no padding."""
    overrides = ["parallel.pipeline=1", "parallel.expert=1", "schedule.name=1f1b", f"parallel.zero={zero}"]
    spec = load(SPECS / "quickstart.dsc", overrides=overrides)
    model = cut_model(spec)
    state_bytes: dict[str, int] = {}
    for block in model.blocks:
        state_bytes |= _always(model, block.steps, 1)
    biases = 4 * sum(ffn.experts for _, ffn in layers_with_experts(spec))
    (state,) = rank_states(spec, make_plan(spec))
    assert sum(state_bytes.values()) + biases == state.total


def test_only_layers_with_a_balancing_loss_have_one() -> None:
    spec = load(SPECS / "tiny.dsc")
    layers = contract_plan(spec, lower_spec(spec), {}).moe_layers
    assert [(layer.site, layer.sequence_loss) for layer in layers] == [("L1", 1e-4), ("M0", 0.0)], "MTP has none"


@pytest.mark.parametrize(("name", "has_hosts"), [("quickstart.dsc", False), ("llama3-8b.dsc", True)])
def test_host_memory_of_an_accelerator_includes_copied_activations(name: str, has_hosts: bool) -> None:
    """Cores copy within their own memory."""
    spec = load(SPECS / name, overrides=["parallel.pipeline=2", "schedule.name=1f1b"])
    lowering = Lowering(make_plan(spec))
    plain, copying = (
        Schedule.from_text(f"# a ranks=2 micro_batches=2 placement=loop(1)\n{first}\nF1.0 B1.0 F1.1 B1.1\n")
        for first in ("F0.0 F0.1 B0.0 B0.1", "F0.0 O0.0 F0.1 R0.0 B0.0 B0.1")
    )
    before, after = (rank_memories(spec, lowering, schedule) for schedule in (plain, copying))
    added = [b.host_bytes - a.host_bytes for a, b in zip(before, after, strict=True)]
    copied = host_buffers(spec, lowering, copying, 0)
    assert copied > 0 and added == [copied * has_hosts, 0]
    assert before[0].host_bytes == rank_states(spec, lowering.plan)[0].host


@pytest.mark.parametrize(
    ("file", "tensor"),
    [
        *product(("deepseek-v3.dsc", "moe-8gpu.dsc", "llama3-8b.dsc"), (1, 2)),
        ("moonlight-16b-a3b.dsc", 1),  # Muon has no tensor ranks
    ],
)
def test_replicas_of_a_tensor_are_alike_but_for_names_and_columns(file: str, tensor: int) -> None:
    """So sizes, scratch memory and checkpoints are computed for one of them, and counted."""
    plan = make_plan(load(SPECS / file, overrides=(f"parallel.tensor={tensor}",)))
    first = {(replica.tensor, replica.slice): replica for replica, _ in plan.alike}
    assert sum(count for _, count in plan.alike) == len(plan.replicas)
    for replica in plan.replicas:
        alike = first[replica.tensor, replica.slice]
        holders = replace(replica.holders, columns=alike.holders.columns)
        assert replace(replica, name=alike.name, holders=holders) == alike
    assert plan.elements == {replica.key: replica.num_elements for replica in plan.replicas}
    assert plan.bucket_elements == {
        bucket.name: sum(plan.elements[key] for key in bucket.replicas) for bucket in plan.all_buckets
    }

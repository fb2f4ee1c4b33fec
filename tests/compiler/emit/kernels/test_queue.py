"""The queue that programs draw their tiles from: its tickets in Triton's interpreter, and its benefit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.queue import PRODUCTS, legs, size_of, strides, time_of, times
from compiler.emit.kernels import emit_kernel
from compiler.emit.kernels.kernel import LEGS
from compiler.ir import Buffer
from runtime.ops import tile_queue as module
from runtime.ops.tile_queue import tile_queue
from tests.compiler.emit.kernels.gate_launch import load

Interpret = Callable[..., Any]


@pytest.mark.parametrize(
    ("tiles", "programs"),
    [(0, 3), (1, 1), (1, 4), (4, 4), (5, 4), (12, 4), (29, 4), (64, 4), (67, 1), (100, 7), (251, 12)],
)
def test_tickets(interpret: Interpret, tiles: int, programs: int) -> None:
    interpret("tests.compiler.emit.kernels.drawn", "tickets", tiles, programs)


@pytest.mark.parametrize("tiles", [0, 1, 111, 112, 300, 4096])
def test_without_a_queue_programs_wait(tiles: int) -> None:
    """With all SMs a queue of legs takes as many rounds as strides. With fewer SMs it never takes more than strides,
    and at most 1.11 times as many as single tiles if there are 8 rounds or more."""
    for programs in (112, 132):
        lengths = [len(leg) for leg in legs(tiles, programs)]
        assert sum(lengths) == sum(strides(tiles, programs)) == tiles
        rounds = -(-tiles // programs)
        assert time_of(lengths, programs) == time_of(strides(tiles, programs), programs) == rounds
        for num_taken in (1, 8, 20, programs // 2):
            sms = programs - num_taken
            queued, strided = time_of(lengths, sms), time_of(strides(tiles, programs), sms)
            assert -(-tiles // sms) <= queued <= strided
            assert rounds < 8 or queued <= 1.11 * time_of([1] * tiles, sms)


def test_four_legs_balance_missing_sms() -> None:
    """8 SMs that are missing cost 1.8 times the time with strides, and with legs little more than their share."""
    assert time_of(strides(4096, 112), 104) == 72 and time_of([1] * 4096, 104) == 40
    with_legs = [time_of([len(leg) for leg in legs(4096, 112, num_legs)], 104) for num_legs in (1, 2, 3, 4, 6)]
    assert with_legs == [72, 53, 45, 41, 40]
    worst = {num_legs: 0.0 for num_legs in (3, LEGS)}
    for tiles in range(1024, 16384, 512):
        for sms in (128, 124, 116, 112):
            for num_legs in worst:
                queued = time_of([len(leg) for leg in legs(tiles, 132, num_legs)], sms)
                worst[num_legs] = max(worst[num_legs], queued / time_of([1] * tiles, sms))
    assert worst[LEGS] < 1.11 < 1.2 < worst[3]
    for shape in PRODUCTS.values():
        all_sms, fewer_sms = (times(*size_of(*shape, gathered=False), num_taken) for num_taken in (0, 8))
        assert all_sms["legs"] < 1.05 * all_sms["strides"] and fewer_sms["legs"] < 1.05 * fewer_sms["strides"]


@pytest.mark.parametrize(("heads", "band", "rising"), [(0, 4, True), (1, 1, False), (6, 4, True), (32, 8, False)])
def test_tickets_of_attention(tmp_path: Path, heads: int, band: int, rising: bool) -> None:
    """Every tile has one ticket, tickets come leg by leg, and each leg is half of the remaining tiles of its lane."""
    programs, sequence = 5, 512
    q, kv, k_rope = (Buffer(name, ("R", width), "bfloat16") for name, width in (("q", 48), ("kv", 64), ("k", 16)))
    file = emit_kernel("mla_attention", (q, kv, k_rope, sequence, 1, 32, 16, 32, 1e4), programs)
    assert file
    tiles, starts = load(file, tmp_path)._legs(heads, 128, rising, band, torch.device("cpu"))
    assert sorted(tiles.tolist()) == list(range(4 * heads))
    assert len(starts) == LEGS * programs + 1 and starts[-1] == len(tiles)
    for lane in zip(*[iter(starts.diff().view(LEGS, programs).t().tolist())], strict=True):
        (counts,) = lane
        remaining = [sum(counts[leg:]) for leg in range(LEGS)]
        assert remaining == [remaining[0] >> leg for leg in range(LEGS)]


def test_streams_have_queues_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(stream=1, capturing=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    module._of_stream.cache_clear()
    device = torch.device("cuda:0")
    first = tile_queue(device)
    assert tile_queue(device) is first and first.nbytes == 16 and not first.any()
    state.stream = 2
    assert tile_queue(device) is not first
    state.stream = 1
    assert tile_queue(device) is first and tile_queue(torch.device("cuda:1")) is not first
    state.capturing = True
    assert tile_queue(device) is not tile_queue(device)  # and none is kept
    state.capturing = False
    assert tile_queue(device) is first
    module._of_stream.cache_clear()

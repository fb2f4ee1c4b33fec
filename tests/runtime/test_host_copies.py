"""Values copied to the host and back: contents, shared storage, and reuse of buffers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from compiler.emit.stage_modules import statement
from compiler.program.lower.lowering import copy_instructions
from runtime.contract.actions import Action
from runtime.step.host_copies import HostCopies
from tests.gpu.pretend import DEVICE, Pretend, pretended


@pytest.mark.parametrize("device", [torch.device("cpu"), DEVICE], ids=["cpu", "device"])
def test_values_come_back_and_still_share_storage(device: torch.device) -> None:
    with pretended() if device == DEVICE else nullcontext():
        host = HostCopies(device)
        for micro_batch in range(3):
            x = torch.arange(12.0, device=device).view(3, 4) + micro_batch
            saved = (x, x[1], x.t(), torch.ones(5, dtype=torch.bfloat16, device=device), torch.empty(0, device=device))
            wanted = [(value.cpu().clone(), value.stride()) for value in saved]
            host.mark_forward_end((0, micro_batch))
            host.take((0, micro_batch), saved)
            x.zero_()
            brought = host.bring((0, micro_batch))
            host.wait((0, micro_batch))
            for value, (numbers, stride) in zip(brought, wanted, strict=True):
                assert torch.equal(value.cpu(), numbers) and value.stride() == stride and value.dtype == numbers.dtype
                assert isinstance(value, Pretend) == (device == DEVICE)
            brought[0][1] = 7.0
            assert brought[1].cpu().tolist() == [7.0] * 4
        assert host.is_empty and host.num_bytes == 12 * 4 + 5 * 2, "one buffer, used three times"


def test_as_many_buffers_as_concurrent_copies() -> None:
    host = HostCopies(torch.device("cpu"))
    for stage, micro_batch in ((0, 0), (0, 1), (1, 0)):
        host.mark_forward_end((stage, micro_batch))
        host.take((stage, micro_batch), (torch.full((4,), 10.0 * stage + micro_batch),))
    assert not host.is_empty
    assert [host.bring(key)[0].tolist()[0] for key in ((0, 1), (1, 0), (0, 0))] == [1.0, 10.0, 0.0]
    assert host.num_bytes == 3 * 16


def test_a_stage_that_saves_nothing_moves_nothing() -> None:
    """A stage with only an embedding rereads nothing of its forward, but still has O and R statements."""
    statements = [[str(statement(i, {})) for i in copy_instructions(Action(kind, 0, 1), ())] for kind in ("O", "R")]
    assert statements == [["c.to_host(0, a)"], ["c.from_host(0, a)"]]
    host = HostCopies(torch.device("cpu"))
    host.mark_forward_end((0, 1))
    host.take((0, 1), ())
    assert host.bring((0, 1)) == []
    host.wait((0, 1))
    assert host.is_empty

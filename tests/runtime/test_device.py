"""Which device a rank uses, and how its SMs are divided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from runtime.comm import collective
from runtime.comm.collective import Communicator
from runtime.comm.connect import CPU, Endpoint
from runtime.comm.transport import Channel
from runtime.observe.device import choose, divide, take


@pytest.mark.parametrize(("devices", "world", "kind"), [(0, 1, "cpu"), (1, 1, "cuda"), (3, 4, "cpu"), (8, 4, "cuda")])
def test_auto_takes_cuda_where_every_rank_has_a_device(
    monkeypatch: pytest.MonkeyPatch, devices: int, world: int, kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert choose("auto", world) == kind
    assert choose("cpu", world) == "cpu"


def test_missing_cuda_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="4 ranks need a device each, and this machine has 1"):
        choose("cuda", 4)


def test_the_cpu_is_always_there() -> None:
    assert take("cpu", 3) == torch.device("cpu")


def test_products_leave_sms_to_communication() -> None:
    cuda = torch.device("cuda", 0)
    assert torch._C._get_sm_carveout_experimental() is None
    try:
        divide(cuda, 20)
        assert torch._C._get_sm_carveout_experimental() == 20
        divide(cuda, 0)
        assert torch._C._get_sm_carveout_experimental() is None
        divide(torch.device("cpu"), 20)
        assert torch._C._get_sm_carveout_experimental() is None
    finally:
        torch._C._set_sm_carveout_experimental(None)


@pytest.mark.parametrize(("sms", "groups"), [(0, 1), (7, 1), (20, 1), (9, 2), (20, 2)])
def test_nccl_uses_at_most_the_reserved_sms(monkeypatch: pytest.MonkeyPatch, sms: int, groups: int) -> None:
    """A middle rank: four directions of messages, counts, rows, and sums. `groups`: two where rows go through nodes."""
    made: dict[str, SimpleNamespace] = {}

    def group(store: object, index: int, size: int, options: SimpleNamespace) -> None:
        made[options.group_name] = options.config

    group.Options = lambda: SimpleNamespace(config=SimpleNamespace())  # type: ignore[attr-defined]
    stand_in = SimpleNamespace(get_backend=lambda: "nccl", PrefixStore=lambda *_: None, ProcessGroupNCCL=group)
    monkeypatch.setattr(collective, "dist", stand_in)
    monkeypatch.setattr(Communicator, "greet", lambda *_: None)
    monkeypatch.setattr(collective.CollectiveLinks, "__init__", lambda *_: None)
    meeting = SimpleNamespace(arrive=lambda *_: None, store=None)
    channels: list[Channel] = [("edge", ends) for ends in ((0, 2), (2, 0), (2, 4), (4, 2))]
    columns = [(2, 3), (2, 8)][:groups]
    channels += [(kind, column) for column in columns for kind in ("expert", "counts")]
    channels.append(("reduce", (0, 2, 4)))
    Endpoint(CPU, sms=sms)._collective_links(2, channels, meeting, CPU)  # type: ignore[arg-type]
    assert len(made) == len(channels)
    if not sms:
        assert not any(vars(config) for config in made.values())
        return
    ctas = {name: config.max_ctas for name, config in made.items()}
    assert 1 <= ctas["reduce 0, 2, 4"] <= ctas["expert 2-3"]
    assert sms - (groups - 1) <= sum(ctas.values()) <= sms

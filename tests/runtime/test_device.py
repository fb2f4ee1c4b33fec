"""Which device a rank uses, and how its SMs are divided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from runtime.comm import collective
from runtime.comm.collective import Communicator, NcclSums
from runtime.comm.connect import CPU, Endpoint
from runtime.comm.transport import Channel, Shares
from runtime.observe import device
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


@pytest.mark.parametrize("chosen", [{}, {"NCCL_RUNTIME_CONNECT": "1", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}])
def test_settings_of_cuda_are_defaults(monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]) -> None:
    """Every algorithm of NCCL is connected when a channel opens, streams do not share queues, and segments expand,
    unless the environment of a run says something else."""
    environment = dict(chosen)
    settings: list[str] = []
    monkeypatch.setattr(device.os, "environ", environment)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    device.set_up_cuda()
    assert environment == {"NCCL_RUNTIME_CONNECT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32", **chosen}
    assert settings == ([] if chosen else ["expandable_segments:True"])


def test_products_leave_sms_to_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, preferred = torch.device("cuda", 0), list[str]()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred.append)
    assert torch._C._get_sm_carveout_experimental() is None
    try:
        divide(cuda, 20)
        assert torch._C._get_sm_carveout_experimental() == 20 and not preferred
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        divide(cuda, 20)
        assert preferred == ["cublaslt"]  # cuBLAS gets no number from torch 2.11
        divide(cuda, 0)
        assert torch._C._get_sm_carveout_experimental() is None
        divide(torch.device("cpu"), 20)
        assert torch._C._get_sm_carveout_experimental() is None
    finally:
        torch._C._set_sm_carveout_experimental(None)


@pytest.mark.parametrize(("sms", "groups"), [(0, 1), (7, 1), (20, 1), (9, 2), (20, 2)])
def test_nccl_uses_at_most_the_reserved_sms(monkeypatch: pytest.MonkeyPatch, sms: int, groups: int) -> None:
    """A middle rank: four directions of messages, counts, rows, and sums. `groups`: two where rows go through nodes."""
    configs: dict[str, SimpleNamespace] = {}

    def group(store: object, index: int, size: int, options: SimpleNamespace) -> None:
        configs[options.group_name] = options.config

    group.Options = lambda: SimpleNamespace(config=SimpleNamespace())  # type: ignore[attr-defined]
    stand_in = SimpleNamespace(get_backend=lambda: "nccl", PrefixStore=lambda *_: None, ProcessGroupNCCL=group)
    monkeypatch.setattr(collective, "dist", stand_in)
    monkeypatch.setattr(Communicator, "greet", lambda *_: None)
    monkeypatch.setattr(collective.CollectiveLinks, "__init__", lambda *_: None)
    meeting = SimpleNamespace(arrive=lambda *_: None, store=None)
    channels = [Channel("edge", ends) for ends in ((0, 2), (2, 0), (2, 4), (4, 2))]
    columns = [(2, 3), (2, 8)][:groups]
    channels += [Channel(kind, column) for column in columns for kind in ("expert", "counts")]
    channels.append(Channel("reduce", (0, 2, 4)))
    Endpoint(CPU, sms=sms)._collective_links(2, channels, meeting, CPU)  # type: ignore[arg-type]
    assert len(configs) == len(channels)
    if not sms:
        limited = {name.split()[0] for name, config in configs.items() if vars(config)}
        assert limited == {"counts"} and all(vars(c).get("max_ctas", 1) == 1 for c in configs.values())
        return
    ctas = {name: config.max_ctas for name, config in configs.items()}
    assert 1 <= ctas["reduce 0, 2, 4"] <= ctas["expert 2-3"]
    assert sms - (groups - 1) <= sum(ctas.values()) <= sms


class NcclGroup:
    """Records the calls that it gets, those of one launch in a list."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def _start_coalescing(self) -> None:
        self.calls.append([])

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        self.calls[-1].append((tensor.tolist(), root))  # type: ignore[attr-defined]

    def _end_coalescing(self) -> object:
        return self

    def _reduce_scatter_base(self, mine: torch.Tensor, whole: torch.Tensor) -> object:
        self.calls.append(("reduce-scatter", mine.tolist()))
        return self

    def allreduce(self, tensors: list[torch.Tensor], op: object) -> object:
        self.calls.append(("all-reduce", tensors[0].tolist()))
        return self


@pytest.mark.parametrize(
    ("shares", "calls"),
    [
        ((), [("all-reduce", [0, 1, 2, 3])]),
        (((slice(0, 2),), (slice(2, 4),)), [("reduce-scatter", [2, 3])]),
        # Each holder owns whole matrices: its own elements are summed to it alone, all in one launch.
        (((slice(1, 4),), (slice(0, 1), slice(4, 4))), [[([1, 2, 3], 0), ([0], 1)]]),
    ],
)
def test_a_gradient_goes_only_to_its_owner(shares: Shares, calls: list[object]) -> None:
    group = NcclGroup()
    communicator = object.__new__(Communicator)
    communicator.rank, communicator.members, communicator._group = 7, (3, 7), group
    sums = NcclSums(communicator, {Channel("reduce", (3, 7)): communicator})
    work: object = sums.start_reduce("flat", (3, 7), torch.arange(4), shares)
    assert work is group
    assert group.calls == calls

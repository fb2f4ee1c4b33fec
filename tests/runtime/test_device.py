"""Which device ranks take."""

from __future__ import annotations

import pytest
import torch

from runtime.device import choose, take


@pytest.mark.parametrize(("devices", "world", "kind"), [(0, 1, "cpu"), (1, 1, "cuda"), (3, 4, "cpu"), (8, 4, "cuda")])
def test_auto_takes_cuda_where_every_rank_has_a_device(
    monkeypatch: pytest.MonkeyPatch, devices: int, world: int, kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert choose("auto", world) == kind
    assert choose("cpu", world) == "cpu"


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="4 ranks need a device each, and this machine has 1"):
        choose("cuda", 4)


def test_the_cpu_is_always_there() -> None:
    assert take("cpu", 3) == torch.device("cpu")

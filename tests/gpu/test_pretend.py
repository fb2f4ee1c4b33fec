"""The runtime on the pretend device: what it makes, copies and sends. Numbers are bit-identical to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.model.ops.on_torch import ON_TORCH
from compiler.pipeline import compile_spec
from runtime.observe import device as devices
from runtime.observe.device import BACKENDS, choose, take
from runtime.ops import OPS
from tests.gpu.pretend import DEVICE, Pretend, pretended
from tests.runtime.ops.cases import ACCUMULATIONS, PURE, Args, Source, arguments, as_tuple, indexer_loss, select_keys
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec, with_host_state


def test_mixing_cpu_and_device_tensors_is_refused() -> None:
    with pretended():
        x = torch.arange(6.0, device=DEVICE).view(2, 3)
        assert x.device == DEVICE and x[0].device == DEVICE and x.new_zeros(2).device == DEVICE
        assert torch.ones(3).to(DEVICE).device == DEVICE and x.to(torch.bfloat16).device == DEVICE
        for stranger in (lambda: x + torch.ones(3), lambda: x.index_select(0, torch.tensor([0]))):
            with pytest.raises(RuntimeError, match="meets one on cpu"):
                stranger()
        x[1].add_(torch.tensor(1.0)).mul_(2)  # a number may come from anywhere
        host = x.cpu()
        x.zero_()
        assert host.tolist() == [[0.0, 1.0, 2.0], [8.0, 10.0, 12.0]] and x.sum().item() == 0
        x.copy_(host)
        assert torch.equal(torch.empty(2, 3).copy_(x), host)


CASES = {
    "alone": ((1, 1, 1), "bf16", 0, "gloo", False),
    "alone-offload": ((1, 1, 1), "bf16", 0, "gloo", True),
    "four-gloo": ((2, 2, 2), "fp32", 0, "gloo", False),
    "four-memory": ((2, 2, 2), "bf16", 1, "memory", True),
}


@pytest.mark.parametrize(("mesh", "precision", "zero", "transport", "offload"), CASES.values(), ids=CASES)
def test_a_device_gives_the_numbers_of_the_cpu(
    tmp_path: Path,
    segments: Segments,
    monkeypatch: pytest.MonkeyPatch,
    mesh: tuple[int, int, int],
    precision: str,
    zero: int,
    transport: str,
    offload: bool,
) -> None:
    """Ranks that share one talk through the host, by either of its transports. With `offload` the optimizer's state is
    on the host, and the moving average of the weights is kept there and validated."""
    pp, ep, dp = mesh
    small = spec(pp, ep, dp, 2 * pp, steps=2, zero=zero, precision=precision)
    if offload:
        small = with_host_state(small, ("moments", "master"))
    write_build(tmp_path / "build", compile_spec(small, segments=segments).files)
    monkeypatch.setenv("DSC_OPS", "torch")  # as on a device without an emitted kernel
    for device in ("cpu", "pretend"):
        run_module("tests.gpu.ranks", tmp_path, pp * dp, device, transport)
    for rank in range(pp * dp):
        file = f"rank_{rank}.safetensors"
        expected, actual = (load_file(tmp_path / f"{device}-{transport}" / file) for device in ("cpu", "pretend"))
        assert expected.keys() == actual.keys()
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), (rank, name)


def test_ranks_may_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose("shared", 4) == "shared" and BACKENDS["shared"] == "gloo"
    set_devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", set_devices.append)
    monkeypatch.setattr(devices, "set_up_cuda", lambda: None)
    assert take("shared", 3) == torch.device("cuda", 0) == set_devices[0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="no CUDA device"):
        choose("shared", 4)


def of_some_rows(case: Callable[..., Args]) -> Args:
    """Arguments of a forward op: rows of several documents, and not all of a sequence."""
    return case(Source(torch.float32, seed=0), documents=True, some=True)


WITHOUT_KERNEL: dict[str, Callable[[], Args]] = {
    **{op: partial(arguments, op, torch.float32) for op in sorted({*PURE, *ACCUMULATIONS} & ON_TORCH.keys())},
    "select_keys of some rows": partial(of_some_rows, select_keys),
    "indexer_loss of some rows": partial(of_some_rows, indexer_loss),
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_the_host_does_not_wait_in_ops_without_a_kernel(name: str) -> None:
    """Results equal those of a CPU, and the host reads nothing from the device to learn a size."""
    op, args = OPS[name.partition(" ")[0]], WITHOUT_KERNEL[name]
    expected = as_tuple(op(*args()))
    kinds: list[str] = []
    with pretended(lambda kind, detail, _: kinds.append(kind)):
        device_args = [Pretend(arg) if isinstance(arg, Tensor) else arg for arg in args()]
        kinds.clear()
        results = as_tuple(op(*device_args))
        assert not {"host waits", "blocking copy"} & {*kinds}
        for result, right in zip(results, expected, strict=True):
            if isinstance(right, Tensor):
                torch.testing.assert_close(result.cpu(), right)

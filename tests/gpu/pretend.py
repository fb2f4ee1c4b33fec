"""A device that is not there: its tensors compute on the CPU, and mix with no CPU tensor.

    with pretended():
        x = torch.zeros(3, device=DEVICE)
        x + torch.ones(3)                   # RuntimeError, as on a GPU

It goes by the name of "meta": torch without CUDA cannot index a tensor that says it is on CUDA.

So the runtime's handling of devices is tested without one: what is made where, what is copied, and when. What computes
is the reference ops on the CPU; that emitted kernels are right is tested elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

DEVICE = torch.device("meta")
aten = torch.ops.aten
# What a GPU takes a tensor of the CPU for, besides numbers (tensors of no dimensions).
COPIES = {aten.copy_.default, aten._to_copy.default}


class Pretend(torch.Tensor):
    """`inner` is where the numbers are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretend:
        assert not isinstance(inner, Pretend)
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretend({self.inner})"

    def __reduce_ex__(self, _: Any) -> Any:
        raise AssertionError("a tensor of a device is written to a file")

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        assert not str(func).startswith("c10d"), f"{func} of tensors of a device, which gloo does not take"
        to_host = "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cpu"
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = torch.device("cpu")
        leaves, shape = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        strangers = [t for t in tensors if not isinstance(t, Pretend) and t.dim() > 0]
        if strangers and func not in COPIES:
            raise RuntimeError(f"{func}: a tensor on a device meets one on cpu of shape {tuple(strangers[0].shape)}")
        leaves = [leaf.inner if isinstance(leaf, Pretend) else leaf for leaf in leaves]
        result = func(*tree_unflatten(leaves, shape)[0], **tree_unflatten(leaves, shape)[1])
        if func is aten.copy_.default:
            return args[0]
        if to_host:
            return result.clone() if func is aten._to_copy.default else result
        result = tree_map_only(torch.Tensor, lambda t: t if isinstance(t, Pretend) else cls(t), result)
        return return_and_correct_aliasing(func, args, kwargs, result)


class _Making(TorchDispatchMode):
    """What is made on the device, or copied there."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not _is_there(kwargs.get("device")) or any(isinstance(arg, Pretend) for arg in args):
            return func(*args, **kwargs)
        made = func(*args, **(kwargs | {"device": torch.device("cpu")}))
        return Pretend(made.clone() if func is aten._to_copy.default else made)


class _Values(TorchFunctionMode):
    """Conversions from and to numbers of Python, which torch does before it asks a mode of the kind above."""

    def __torch_function__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and _is_there(kwargs.get("device")):
            return Pretend(func(*args, **(kwargs | {"device": "cpu"})))
        if args and isinstance(args[0], Pretend):
            if func is torch.Tensor.tolist:
                return args[0].inner.tolist()
            if func is torch.Tensor.new_tensor:
                return Pretend(args[0].inner.new_tensor(*args[1:], **kwargs))
            if func is torch.Tensor.__setitem__ and isinstance(args[2], int | float):
                args[0].inner[tree_map_only(Pretend, lambda t: t.inner, args[1])] = args[2]
                return None
        return func(*args, **kwargs)


def _is_there(value: Any) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == DEVICE.type


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    with _Values(), _Making():
        yield


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The numbers."""
    return {name: tensor.inner if isinstance(tensor, Pretend) else tensor for name, tensor in tensors.items()}

"""A simulated device: its tensors compute on the CPU, and cannot be mixed with CPU tensors.

    with pretended():
        x = torch.zeros(3, device=DEVICE)
        x + torch.ones(3)                   # RuntimeError, as on a GPU

Its device type is "meta": torch without CUDA cannot index a tensor with a CUDA device.

So the runtime's handling of devices is tested without one: where tensors are made, and what is copied when. Computation
uses the reference ops on the CPU; emitted kernels are tested elsewhere.

`pretended(see)` also reports to `see` what a device would see, in order: launches, copies, and waits of the host.
An op with an emitted kernel is one launch of that kernel, whatever its reference does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from runtime.build import kernels
from runtime.contract import KernelUse, TensorArgument
from runtime.contract.names import KernelExtent
from runtime.state import optimizers, quantised

# launch: of a kernel · copy: the host continues · blocking copy: the host waits · host waits: for the device
# group call, stream waits: pretend_nccl.py
Kind = Literal["launch", "copy", "blocking copy", "host waits", "group call", "stream waits"]
See = Callable[[Kind, str, str], None]  # of what kind, what, on which stream

DEVICE = torch.device("meta")
aten = torch.ops.aten
# Uses of CPU tensors that a GPU accepts, besides numbers (tensors without dimensions).
COPIES = {aten.copy_.default, aten._to_copy.default}
# What reads a number of the device to know the size of a result, or gives it to the host.
READS = {
    aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.bincount, aten.masked_select,
    aten.repeat_interleave, aten._unique2, aten.unique_dim,
}  # fmt: skip
MAKES_NO_LAUNCH = {
    aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided, aten._unsafe_view,
}  # fmt: skip


class Pretend(torch.Tensor):
    """`inner` is where the numbers are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretend:
        assert not isinstance(inner, Pretend)
        wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        wrapper.inner = inner
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretend({self.inner})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def __reduce_ex__(self, _: Any) -> Any:
        raise AssertionError("a tensor of a device is written to a file")

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, given = dict(kwargs or {}), kwargs or {}
        assert not str(func).startswith("c10d"), f"{func} of tensors of a device, which gloo does not take"
        to_host = "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cpu"
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = torch.device("cpu")
        leaves, shape = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        strangers = [t for t in tensors if not isinstance(t, Pretend) and t.dim() > 0]
        if strangers and func not in COPIES:
            raise RuntimeError(f"{func}: a tensor on a device meets one on cpu of shape {tuple(strangers[0].shape)}")
        SEEN.op(func, args, kwargs, to_host)
        if SEEN.captured is not None:
            return SEEN.captured.run(func, args, given)
        leaves = [leaf.inner if isinstance(leaf, Pretend) else leaf for leaf in leaves]
        result = func(*tree_unflatten(leaves, shape)[0], **tree_unflatten(leaves, shape)[1])
        if func is aten.copy_.default:
            return args[0]
        if to_host:
            return result.clone() if func is aten._to_copy.default else result
        result = tree_map_only(torch.Tensor, lambda t: t if isinstance(t, Pretend) else cls(t), result)
        return return_and_correct_aliasing(func, args, kwargs, result)


class _Making(TorchDispatchMode):
    """Functions that create tensors on the device or copy them there."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not _is_there(kwargs.get("device")) or any(isinstance(arg, Pretend) for arg in args):
            return func(*args, **kwargs)
        if func is aten._to_copy.default:
            SEEN.say("blocking copy", "to the device")
        elif func.overloadpacket not in MAKES_NO_LAUNCH:
            SEEN.say("launch", _name(func))

        def make() -> Pretend:
            result = func(*args, **(kwargs | {"device": torch.device("cpu")}))
            return Pretend(result.clone() if func is aten._to_copy.default else result)

        make.overloadpacket = func.overloadpacket  # type: ignore[attr-defined]
        return make() if SEEN.captured is None else SEEN.captured.run(make, (), {})


class _Values(TorchFunctionMode):
    """Conversions from and to numbers of Python, which torch does before it asks a mode of the kind above."""

    def __torch_function__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.pop("pin_memory", False):
            tensor = func(*args, **kwargs)
            tensor.pinned = True
            return tensor
        if func is torch.tensor and _is_there(kwargs.get("device")):
            SEEN.say("blocking copy", "to the device")
            return Pretend(func(*args, **(kwargs | {"device": "cpu"})))
        if args and isinstance(args[0], Pretend):
            if func is torch.Tensor.tolist:
                SEEN.say("host waits", "tolist")
                return args[0].inner.tolist()
            if func is torch.Tensor.new_tensor:
                SEEN.say("blocking copy", "to the device")
                return Pretend(args[0].inner.new_tensor(*args[1:], **kwargs))
            if func is torch.Tensor.__setitem__ and isinstance(args[2], int | float):
                SEEN.say("launch", "fill_")
                args[0].inner[tree_map_only(Pretend, lambda t: t.inner, args[1])] = args[2]
                return None
        return func(*args, **kwargs)


def _is_there(value: Any) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == DEVICE.type


def _name(func: Any) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


# ---------------------------------------------------------------- observation


class Graph(Protocol):
    """A graph that is being captured (pretend_graphs.py)."""

    def say(self, kind: Kind, what: str) -> None:
        """Record what a replay will report."""

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record a call, and return its result without numbers."""


class Seen:
    """Reports what a device would see. `stream`: the current one. Inside a kernel nothing else is reported. `graph`:
    what is being captured."""

    def __init__(self) -> None:
        self.see: See | None = None
        self.graph: Graph | None = None
        self.stream, self.kernels, self.streams = "compute", 0, 0
        self.calls: dict[KernelUse, None] = {}  # distinct calls of kernels, in order

    @property
    def captured(self) -> Graph | None:
        """The graph that the next call belongs to. A kernel is one call."""
        return None if self.kernels else self.graph

    def say(self, kind: Kind, what: str) -> None:
        if self.captured is not None:
            self.captured.say(kind, what)
        elif self.see is not None and not self.kernels:
            self.see(kind, what, self.stream)

    def op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], to_host: bool) -> None:
        """Report what a torch op on tensors of the device means to it."""
        packet, alias = func.overloadpacket, func._schema.returns and func._schema.returns[0].alias_info
        if func is aten.copy_.default:
            waits = not ((len(args) > 2 and args[2]) or kwargs.get("non_blocking"))
            self._copy(args[0], args[1], waits)
        elif to_host:
            self.say("host waits", "for a copy")
        elif packet in READS or (packet is aten.index and any(_is_mask(i) for i in args[1])):
            self.say("host waits", _name(func))
        elif packet not in MAKES_NO_LAUNCH and not (alias and not alias.is_write):  # not a view
            self.say("launch", _name(func))

    def _copy(self, to: torch.Tensor, source: torch.Tensor, waits: bool) -> None:
        if isinstance(to, Pretend) and (isinstance(source, Pretend) or source.dim() == 0):
            self.say("launch", "copy_")
        elif isinstance(to, Pretend):
            pinned = getattr(source, "pinned", False) and not waits
            self.say("copy" if pinned else "blocking copy", "to the device")
        elif getattr(to, "pinned", False) and not waits:
            self.say("copy", "to the host")
        else:
            self.say("host waits", "for a copy")

    @contextlib.contextmanager
    def within_kernel(self, name: str) -> Iterator[None]:
        self.say("launch", name)
        self.kernels += 1
        try:
            yield
        finally:
            self.kernels -= 1


SEEN = Seen()


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


class Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, stream: str) -> None:
        self.stream = stream


class Stream:
    """Replaces torch.cuda.Stream. Streams are numbered in order of creation."""

    def __init__(self, device: torch.device, name: str = "") -> None:
        assert device == DEVICE
        SEEN.streams += not name
        self.name = name or f"side {SEEN.streams}"

    def synchronize(self) -> None:
        SEEN.say("host waits", f"for stream {self.name}")

    def record_event(self) -> Event:
        return Event(self.name)

    def wait_event(self, event: Event) -> None:
        self._wait(f"for stream {event.stream} up to an event")

    def wait_stream(self, other: Stream) -> None:
        self._wait(f"for stream {other.name}")

    def _wait(self, what: str) -> None:
        with on_stream(self):
            SEEN.say("stream waits", what)


def current_stream() -> Stream:
    """Replaces torch.cuda.current_stream."""
    return Stream(DEVICE, SEEN.stream)


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Replaces torch.cuda.stream."""
    before, SEEN.stream = SEEN.stream, stream.name
    try:
        yield
    finally:
        SEEN.stream = before


def on_cuda(_: str, file: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `on_cuda` of runtime/build/kernels.py: runs the reference op, reported as a launch of its kernel."""

    @functools.wraps(otherwise)
    def op(*args: Any, **kwargs: Any) -> Any:
        if not SEEN.kernels:
            SEEN.calls.setdefault(_use(file, otherwise.__name__, args))
        if (graph := SEEN.captured) is not None:
            graph.say("launch", f"{file}: {otherwise.__name__}")
            return graph.run(otherwise, args, kwargs)
        with SEEN.within_kernel(f"{file}: {otherwise.__name__}"):
            return otherwise(*args, **kwargs)

    return op


def _use(file: str, op: str, args: tuple[Any, ...]) -> KernelUse:
    """The call of a kernel with these arguments, as launches.json would list it."""
    return KernelUse(file, op, tuple(_described(arg) if isinstance(arg, Pretend) else arg for arg in args))


def _described(tensor: Pretend) -> TensorArgument:
    shape, strides = (tuple(KernelExtent(str(size)) for size in sizes) for sizes in (tensor.shape, tensor.stride()))
    offset = tensor.inner.storage_offset()
    is_plain = tensor.is_contiguous() and not offset
    return TensorArgument(str(tensor.dtype).removeprefix("torch."), shape, () if is_plain else strides, offset)


@contextlib.contextmanager
def pretended(see: See | None = None) -> Iterator[None]:
    SEEN.streams = 0
    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "stream", on_stream),
        (torch.cuda, "current_stream", current_stream),
    ]
    stand_ins += [(module, "on_cuda", on_cuda) for module in (kernels, optimizers, quantised)]
    with contextlib.ExitStack() as stack:
        for module, name, value in stand_ins:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(SEEN, "see", see))
        stack.enter_context(_Values())
        stack.enter_context(_Making())
        yield


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The numbers."""
    return {name: tensor.inner if isinstance(tensor, Pretend) else tensor for name, tensor in tensors.items()}

"""CUDA graphs of the calls of segments that a build marks with `c.graph`.

A program calls the same segments in the same order each time. The first program of a kind launches every kernel, which
loads it and lets cuBLAS allocate its workspace. The next run of each program captures each marked call in a graph, and
replays it at once, as capturing executes nothing. Later runs replay.

A graph reads and writes fixed addresses. Weights, gradients and results of graphs keep theirs. Other arguments, such as
tokens and messages, are copied into memory of the graph before each replay.

All graphs of a rank share one pool of memory. While a program is captured, its values own memory of the pool until the
program frees them, as without graphs; graphs that are captured later may take it then. Replays have the same order, so
their values need not own memory: no graph writes to a value that is still read. When a program ends, all are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from runtime.contract.names import ProgramKind, ProgramName

Segment = Callable[..., Any]  # tensors → None, a tensor or a tuple of tensors
Mode = Literal["launch", "capture", "replay"]


class _Graph(NamedTuple):
    """A captured call. `rooms`: by argument that is copied, where to. `addresses`: of the other arguments."""

    graph: torch.cuda.CUDAGraph
    rooms: Mapping[int, Tensor]
    addresses: Mapping[int, int]
    results: Any

    def replay(self, arguments: Sequence[Tensor]) -> Any:
        for index, room in self.rooms.items():
            room.copy_(arguments[index])
        for index, address in self.addresses.items():
            assert arguments[index].data_ptr() == address, f"argument {index} of a graph has moved"
        self.graph.replay()
        return self.results


class _Capturing(NamedTuple):
    """The stream on which a rank captures, and the pool of its graphs. Memory of a pool belongs to one stream."""

    stream: torch.cuda.Stream
    pool: Any


@dataclass
class Graphs:
    """The graphs of a rank, by program, in the order of calls. `device`: on a CPU there are none, and segments are
    called. `spaces`: namespaces of tensors that keep their addresses. `is_on`: whether to capture."""

    device: torch.device
    spaces: Sequence[object]
    is_on: bool = True
    _of_program: dict[ProgramName, list[_Graph]] = field(default_factory=dict)
    _launched: set[ProgramKind] = field(default_factory=set)  # kinds of programs whose kernels are loaded
    _current: list[_Graph] = field(default_factory=list)  # of the current program
    _mode: Mode = "launch"
    _next: int = 0  # index of the next call in `_current`
    _fixed: set[int] = field(default_factory=set)  # addresses of storages
    _owned: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # bytes of the pool, by address and size
    _capturing: _Capturing | None = None

    def __post_init__(self) -> None:
        self.is_on = self.is_on and self.device.type != "cpu"

    @property
    def exist(self) -> bool:
        """Whether a graph has been captured, so that its arguments must not move."""
        return any(self._of_program.values())

    def begin(self, program: ProgramName) -> None:
        """Begin a run of a program."""
        self._next = 0
        if not self.is_on or program.kind not in self._launched:
            self._mode = "launch"
            self._launched.add(program.kind)
        elif program in self._of_program:
            self._mode, self._current = "replay", self._of_program[program]
        else:
            self._mode, self._current = "capture", self._of_program.setdefault(program, [])

    def call(self, segment: Segment, arguments: Sequence[Tensor]) -> Any:
        """Call a segment, as the current run of the program does it."""
        if self._mode == "launch":
            return segment(*arguments)
        if self._mode == "capture":
            return self._capture(segment, arguments)
        graph = self._current[self._next]
        self._next += 1
        return graph.replay(arguments)

    def _begin_capture(self) -> _Capturing:
        """Prepare for the first graph of a program."""
        kept = (value for space in self.spaces for value in vars(space).values() if isinstance(value, Tensor))
        self._fixed |= {value.untyped_storage().data_ptr() for value in kept}
        torch.cuda.empty_cache()  # the pool takes the place of the memory that values had without graphs
        return self._capturing or _Capturing(torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle())

    def _capture(self, segment: Segment, arguments: Sequence[Tensor]) -> Any:
        if not self._current:
            self._capturing = self._begin_capture()
        assert self._capturing is not None
        stream, pool = self._capturing
        graph = torch.cuda.CUDAGraph()
        keep = [argument.untyped_storage().data_ptr() in self._fixed for argument in arguments]
        with torch.cuda.stream(stream):
            # Other threads may use CUDA meanwhile: NCCL's watchdog does.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                pairs = zip(arguments, keep, strict=True)
                inputs = [argument if is_kept else torch.empty_like(argument) for argument, is_kept in pairs]
                results = segment(*inputs)
            finally:
                graph.capture_end()
        captured = _Graph(
            graph,
            rooms={index: self._view(inputs[index]) for index, is_kept in enumerate(keep) if not is_kept},
            addresses={index: arguments[index].data_ptr() for index, is_kept in enumerate(keep) if is_kept},
            results=self._views(results),
        )
        self._current.append(captured)
        captured.replay(arguments)
        return results

    def _views(self, results: Any) -> Any:
        """Return results as tensors that do not own their memory."""
        return tuple(map(self._view, results)) if isinstance(results, tuple) else self._view(results)

    def _view(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        flat = self._owned.get(place)
        if flat is None:
            flat = self._owned[place] = bytes_at(*place, self.device)
            self._fixed.add(place[0])
        return flat.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


@dataclass(frozen=True)
class _Memory:
    """Memory that something else owns, in the form of the array interface of CUDA."""

    __cuda_array_interface__: Mapping[str, object]


def bytes_at(address: int, size: int, device: torch.device) -> Tensor:
    """Return `size` bytes of a device as a tensor that does not own them: [size] uint8."""
    form = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(_Memory(form), device=device)

"""Measures the speed of this machine: ops at given shapes, a copy, an optimizer step, and transfers between processes.

    python -P -m runtime.observe.calibrate JOB.json OUT.json      (`dsc calibrate` writes JOB and reads OUT)

On the CPU, as many processes as ranks measure at the same time, with one thread each, so that caches and memory are
shared as in training. Ops are called in turn, so that none finds its operands in the cache. Times are processor times,
so other users of the machine do not affect them. On CUDA one process measures with events; transfers need two devices.
Exit codes: those of `Outcome`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.connect import Endpoint
from runtime.comm.transport import Rows, WantedChannels
from runtime.contract import Mesh, Opening
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.observe.device import BACKENDS, choose, take
from runtime.ops import OPS

Task = Mapping[str, Any]
Calls = list[tuple[Callable[..., Any], tuple[Any, ...]]]

PLAIN: dict[str, Callable[..., Any]] = {"add": torch.add, "cat2": lambda a, b: torch.cat((a, b), dim=-1)}
LEAST_ROUNDS, MOST_ROUNDS = 3, 60
COPY_BYTES = 64 << 20
STREAMS_SHARE = 0.1  # share of the time for a copy and an optimizer step
OPTIMIZER_ELEMENTS = 1 << 21
LAUNCHES = 100  # calls of an op on so few elements that the launch dominates
EMPTY_ELEMENTS = 8
TRANSFER_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
TRANSFER_ROUNDS = 12


def main(argv: Sequence[str]) -> int:
    """Run a job, with a line of progress on stderr for each part."""
    job_file, out_file = map(Path, argv)
    job = json.loads(job_file.read_text("utf-8"))
    try:
        choose(job["device"], job["processes"])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="dsc-calibrate-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)

        def compute(rank: int, world: int, board: Board) -> None:
            speeds = measure_ops(job["tasks"], take(job["device"], rank), job["budget_s"], board)
            (place / f"ops_{rank}.json").write_text(json.dumps(speeds), "utf-8")

        def transfers(rank: int, world: int, board: Board) -> None:
            times = measure_transfers(take(job["device"], rank), world, board)
            if rank == 0:
                (place / "transfers.json").write_text(json.dumps(times), "utf-8")

        _say(f"{len(job['tasks'])} ops on {job['processes']} processes at a time")
        outcome = launch(compute, job["processes"], folder=place, backend=None)
        if outcome.exit_code:
            print(outcome, file=sys.stderr)
            return outcome.exit_code
        results = [json.loads((place / f"ops_{rank}.json").read_text("utf-8")) for rank in range(job["processes"])]
        result: dict[str, Any] = {key: _median_of(key, results) for key in results[0]}
        result["device"] = torch.cuda.get_device_name(0) if job["device"] == "cuda" else "cpu"
        if job["transfers"] > 1:
            _say(f"transfers between {job['transfers']} processes")
            outcome = launch(transfers, job["transfers"], folder=place, backend=BACKENDS[job["device"]])
            if outcome.exit_code:
                print(outcome, file=sys.stderr)
                return outcome.exit_code
            result |= json.loads((place / "transfers.json").read_text("utf-8"))
    out_file.write_text(json.dumps(result), "utf-8")
    return 0


def _median_of(key: str, results: Sequence[Mapping[str, Any]]) -> Any:
    values = [result[key] for result in results]
    if isinstance(values[0], list):
        return [statistics.median(times) for times in zip(*values, strict=True)]
    return statistics.median(values)


def _say(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- compute


def measure_ops(tasks: Sequence[Task], device: torch.device, budget_s: float, board: Board) -> dict[str, Any]:
    """Return the seconds of each task and of an empty op, and byte/s of a copy and of an update of weights."""
    generator = torch.Generator().manual_seed(1)
    calls: Calls = [(_function(task["op"]), arguments(task, generator, device)) for task in tasks]
    operand = torch.zeros(EMPTY_ELEMENTS, device=device)
    *ops, empty = time_in_turn([*calls, (_launches, (operand,))], device, budget_s, board)
    # Measured apart from the ops, because they evict data from the caches that ops find there in training.
    source = torch.ones(COPY_BYTES // 4, device=device)
    flat = [torch.full((OPTIMIZER_ELEMENTS,), 0.1, device=device) for _ in range(4)]
    streams: Calls = [(torch.clone, (source,)), (_update, (*flat, torch.tensor(1.0, device=device)))]
    copy, optimizer = time_in_turn(streams, device, budget_s * STREAMS_SHARE, board)
    return {
        "ops_s": ops,
        "launch_s": empty / LAUNCHES,
        "copy_bytes": 2 * COPY_BYTES / copy,
        "optimizer_bytes": 7 * 4 * OPTIMIZER_ELEMENTS / optimizer,  # three tensors twice, gradients once
    }


def time_in_turn(calls: Calls, device: torch.device, budget_s: float, board: Board) -> list[float]:
    """Return the median seconds of each call. Calls run in turn, for as many rounds as the budget allows."""
    time_call = _cuda_s if device.type == "cuda" else _processor_s
    seconds: list[list[float]] = [[] for _ in calls]
    results: list[Any] = [None] * len(calls)  # results are kept for a round, like activations, so that memory is cold
    end = time.monotonic() + budget_s
    for round_ in range(MOST_ROUNDS):
        for index, (function, args) in enumerate(calls):
            took_s, results[index] = time_call(function, args)
            seconds[index].append(took_s)
        board.set_action(f"round {round_}")
        if time.monotonic() > end and round_ >= LEAST_ROUNDS:
            break
    return [statistics.median(times[1:]) for times in seconds]  # the first call fills caches


def _processor_s(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, Any]:
    start = time.thread_time()
    result = function(*args)
    return time.thread_time() - start, result


def _cuda_s(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, Any]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = function(*args)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3, result


def _function(op: str) -> Callable[..., Any]:
    """Return an op; a weight gradient accumulates into a buffer, as in training."""
    if op.endswith("_wgrad"):
        return OPS[f"{op}_"]
    return PLAIN[op] if op in PLAIN else OPS[op]


def arguments(task: Task, generator: torch.Generator, device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of a task: random tensors, and valid indices."""
    return tuple(_tensor(arg, generator).to(device) if isinstance(arg, dict) else arg for arg in task["args"])


def _tensor(arg: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    shape, dtype = arg["shape"], getattr(torch, arg["dtype"])
    match arg.get("holds"):
        case "below":
            return torch.randint(arg["bound"], shape, generator=generator, dtype=dtype)
        case "choices":  # [T, K]: distinct experts for each token
            rows, chosen = shape
            return torch.rand(rows, arg["bound"], generator=generator).topk(chosen).indices.to(dtype)
        case "order":
            return torch.randperm(shape[0], generator=generator).to(dtype)
        case "ends":  # of groups, of equal size
            ends = [(group + 1) * arg["bound"] // shape[0] for group in range(shape[0])]
            return torch.tensor(ends, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float32).mul_(0.5).to(dtype)


def _launches(nothing: Tensor) -> None:
    for _ in range(LAUNCHES):
        torch.add(nothing, nothing)


def _update(weights: Tensor, gradients: Tensor, first: Tensor, second: Tensor, step: Tensor) -> None:
    """Stream through memory like an optimizer, with torch's fused update: four tensors in, three out."""
    torch._fused_adamw_(
        [weights],
        [gradients],
        [first],
        [second],
        [],
        [step],
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


# ---------------------------------------------------------------- transfers


def measure_transfers(device: torch.device, world: int, board: Board) -> dict[str, list[tuple[int, float]]]:
    """Return (bytes that a rank sends, wall-clock seconds) of an all-to-all, a message to the next rank, and an
    all-reduce, over the channels that training would use (runtime/comm/connect.py)."""
    times: dict[str, list[tuple[int, float]]] = {"all_to_all": [], "message": [], "all_reduce": []}
    rank, everyone = dist.get_rank(), tuple(range(world))
    mesh = Mesh(pp=world, dp=1, ep=1, tp=1, cp=1)
    openings = (
        Opening("edge", (0, 1), "each"),
        Opening("edge", (1, 0), "each"),
        Opening("expert", everyone, "block"),
        Opening("reduce", everyone, "all"),
        Opening("world", everyone, "all"),
    )
    flats = {f"flat {size}": (everyone, size) for size in TRANSFER_BYTES}
    links = Endpoint(device).connect(rank, WantedChannels(mesh, openings, flats))
    forward, back = (links.edge(*ends) if rank < 2 else None for ends in ((0, 1), (1, 0)))
    swap = links.swap("expert", everyone)
    assert swap is not None, "transfers are between several ranks"
    for size in TRANSFER_BYTES:
        placed = links.flat(f"flat {size}", size // 4, torch.float32)
        outgoing = torch.ones(size // 4, device=device)
        flat = outgoing.clone() if placed is None else placed
        incoming = torch.empty_like(outgoing)

        def message(outgoing: Tensor = outgoing, incoming: Tensor = incoming) -> None:
            if rank == 0 and forward and back:
                forward.send("there", outgoing).wait()
                back.post("back", incoming).wait()  # so half the time is one message
            elif rank == 1 and forward and back:
                forward.post("there", incoming).wait()
                back.send("back", outgoing).wait()

        def all_to_all(outgoing: Tensor = outgoing, incoming: Tensor = incoming) -> None:
            counts = (len(outgoing) // len(everyone),) * len(everyone)
            for work in swap.start("rows", Rows(outgoing, counts), Rows(incoming, counts)):
                work.wait()

        def all_reduce(name: str = f"flat {size}", flat: Tensor = flat) -> None:
            links.sums.start_reduce(name, everyone, flat).wait()

        for name, call, share in (
            ("all_to_all", all_to_all, 1),
            ("message", message, 2),
            ("all_reduce", all_reduce, 1),
        ):
            board.set_action(f"{name} {size}")
            times[name].append((size, _clock_s(call, device) / share))
    return times


def _clock_s(call: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(TRANSFER_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

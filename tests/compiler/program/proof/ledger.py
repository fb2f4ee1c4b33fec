"""Peak bytes of a rank, counted independently of the proof: a list of what exists after each event, summed afresh."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from compiler.ir import Body, Buffer, Instruction, Message, Program
from compiler.ir.dtypes import ITEMSIZE
from runtime.contract.names import ActionName

Name = tuple[str, ...]  # (stage, micro-batch, name) of a value; ("sent", message) in flight; ("told", …)


def peak_bytes(program: Program, rank: int, rows: int) -> int:
    """The most bytes that exist at once on `rank`, if it receives `rows` rows in every dispatch."""
    return max(sum(storages.values()) for storages in _history(program, rank, rows))


def size(buffer: Buffer, rows: int) -> int:
    """Bytes of a tensor; an 8-bit tensor has four more for each tile of a row."""
    element, _, tile = buffer.dtype.removesuffix("]").partition("[1x")
    extents = [rows if extent == "R" else int(extent) for extent in buffer.shape]
    scales = 4 * extents[0] * -(-extents[1] // int(tile)) if tile else 0
    return prod(extents) * ITEMSIZE[element] + scales


def _history(program: Program, rank: int, rows: int) -> Iterator[dict[Name, int]]:
    """Storage after each event: name of the value that made it, or of its message -> bytes."""
    bodies = {body.name: body for body in program.bodies[rank]}
    root: dict[Name, Name] = {}  # every live name, and send under way -> its storage
    sizes: dict[Name, int] = {}

    def existing() -> dict[Name, int]:
        return {storage: sizes[storage] for storage in set(root.values())}

    for invocation in program.invocations[rank]:
        for _, message in invocation.posts:
            assert program.message is not None
            root["posted", str(message)] = "message", str(message)
            sizes["message", str(message)] = size(program.message, rows)
            yield existing()
        body = bodies[invocation.body]
        for index, i in enumerate(body.instructions):
            micro_batch = invocation.micro_batches[i.slot]
            _apply(i, _results(body, index), micro_batch, root, sizes, rows, i.peer == rank)
            yield existing()
        for _, message in invocation.releases:
            del root["sent", str(message)]


def _results(body: Body, index: int) -> tuple[Buffer, ...]:
    """The values that an instruction allocates; the results of an exchange exist from its start."""
    start = body.instructions[index]
    if start.kind not in ("counts", "dispatch", "combine"):
        return () if start.kind in ("wait", "receive") else start.writes
    ends = (i for i in body.instructions[index:] if i.wait == start.kind and i.site == start.site)
    return next(i.writes for i in ends if (i.slot, i.phase) == (start.slot, start.phase))


def _apply(
    i: Instruction,
    results: tuple[Buffer, ...],
    micro_batch: int,
    root: dict[Name, Name],
    sizes: dict[Name, int],
    rows: int,
    stays: bool,
) -> None:
    """`stays`: the message that it sends or receives stays on the rank, in its storage."""
    stage = str(i.action.stage)

    def name(value: str) -> Name:
        return stage, str(micro_batch), value

    if i.kind == "free":
        for value in i.reads:
            del root[name(value)]
    elif i.kind == "send":
        produced = Message(ActionName.of("F" if i.phase == "F" else "B", i.action.stage), micro_batch)
        root["sent", str(produced)] = root[name(i.reads[0])]
    elif i.kind == "tell":
        root["told", stage, str(micro_batch), i.site] = root[name(i.reads[0])]
    elif i.kind == "receive":
        forward, stage_number = i.phase == "F", i.action.stage
        producer = ActionName.of("F", stage_number - 1) if forward else ActionName.of("B", stage_number + 1)
        root[name(i.writes[0].name)] = root.pop(("sent" if stays else "posted", str(Message(producer, micro_batch))))
    for buffer in sorted(results, key=lambda buffer: bool(buffer.alias)):
        root[name(buffer.name)] = root[name(buffer.alias)] if buffer.alias else name(buffer.name)
        sizes.setdefault(name(buffer.name), size(buffer, rows))

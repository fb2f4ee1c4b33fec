"""What exchanges need beside the tensors that they are given and return: copies that are under way.

Ranks whose channels are collectives (NCCL, or gloo between machines) send and receive rows in one contiguous tensor.
Rows that lie by expert are therefore packed before they are sent and get room before they are moved to their places
(runtime/comm/collective.py). With `route = nodes` a rank chooses the rows to send for both hops, and adds rows on the
way back (runtime/comm/nodes.py). A run's ledger does not see these tensors, and they are no values of the program.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.ir import Buffer, Instruction
from compiler.ir.dtypes import extent_at, tensor_bytes
from compiler.ir.received_rows import Received
from compiler.program.proof.effects import Staged, Staging
from dsl.facts.nodes import group_nodes
from dsl.schema import Spec

INTEGERS = ("int32", "int64")  # tables and counts, which are not moved


def staging_of(spec: Spec) -> Staging | None:
    """What each exchange of a spec's program stages; None where none stages anything."""
    parallel = spec.parallel
    if parallel.expert_group == parallel.tensor == parallel.context == 1 and parallel.zero < 2:
        return None
    across = _crosses_nodes(spec)
    collective = spec.has_hosts or (across and not spec.by_nodes)

    def staged(start: Instruction, read: Sequence[Buffer], written: Sequence[Buffer], rows: Received) -> Staged:
        if start.kind == "scatter_rows":  # the sums are made in a room as large as what is summed
            return Staged(sum(each.bytes_at(*rows) for each in read))
        if start.kind == "gather_sequences":  # which are put in the order of sequences when they are there
            return Staged(at_wait=sum(each.bytes_at(*rows) for each in written))
        if start.kind == "scatter_sequences":  # which is put in the order of ranks first
            return Staged(2 * sum(each.bytes_at(*rows) for each in read))
        if start.kind == "scatter":
            # gloo has no reduce-scatter: the parts of the other holders come to a second buffer
            several = not spec.has_hosts and spec.cluster.num_nodes > 1
            return Staged(sum(each.bytes_at(*rows) for each in read) if several else 0)
        if start.kind not in ("dispatch", "combine") or spec.parallel.expert_group == 1:
            return Staged()
        forward = (start.kind == "dispatch") == (start.phase == "F")
        if not spec.by_nodes:
            # forward: room for the rows that come; back: the rows that go, packed
            lying = written if forward else read
            return Staged(sum(_bytes(each, rows.rows, rows) for each in _moved(lying)) if collective else 0)
        tensors = [_two_hops(each, forward, rows, collective) for each in _moved(read)]
        return Staged(sum(held for held, _ in tensors), _most(tensors))

    return staged


def _two_hops(tensor: Buffer, forward: bool, rows: Received, collective: bool) -> tuple[int, int]:
    """What an exchange between nodes stages of a tensor in its first hop and in its second.

    A tensor of one dimension has a gate weight for each row: it goes as it is, and comes back as it went.
    """
    is_gate = len(tensor.shape) == 1
    by_expert = _bytes(tensor, rows.rows, rows) if collective else 0  # packed, or room for what comes
    forwarded, copies = _bytes(tensor, rows.forwarded, rows), _bytes(tensor, rows.copies, rows)
    if forward:  # the copies that go; rows for each expert, of the copies that came
        return 0 if is_gate else copies, forwarded + by_expert
    return by_expert, forwarded if is_gate else 2 * copies  # rows by expert; sums that go, and those that come


def _most(tensors: Sequence[tuple[int, int]]) -> int:
    """The most bytes in a wait: the second hop of each tensor begins behind its first, one tensor after another."""
    firsts = sum(held for held, _ in tensors)
    most = seconds = 0
    for held, then in tensors:
        firsts, seconds = firsts - held, seconds + then
        most = max(most, firsts + seconds)
    return most


def _moved(read: Sequence[Buffer]) -> list[Buffer]:
    return [each for each in read if each.shape and each.dtype not in INTEGERS]


def _bytes(tensor: Buffer, count: int, rows: Received) -> int:
    """Bytes of `count` rows of a tensor."""
    return tensor_bytes((count, *(extent_at(each, *rows) for each in tensor.shape[1:])), tensor.dtype)


def _crosses_nodes(spec: Spec) -> bool:
    """Whether an expert group lies on several nodes."""
    return any(group_nodes(node.devices, spec.parallel.expert_group) != 1 for _, node in spec.cluster.parts)

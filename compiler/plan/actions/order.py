"""Chains → one instruction list over a compute lane and a communication lane.

The order of segments and exchanges is that of `Orders.best`: a lone backward fills the time of an all-to-all with
weight gradients and the shared expert, and a pair, of any two independent actions, hides one micro-batch's exchanges
under the other's compute. An exchange is started as soon as its operands are made and the exchanges before it in that
order are started; it is waited for right before its first reader, as is the message of a receive. A send follows its
operand at once and is never waited for.

Segments that add to one gradient do so in base order, slot by slot: results do not depend on the rates of a device.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from compiler.files.cache import text_of
from compiler.ir import Instruction
from compiler.plan.actions import lanes
from compiler.plan.actions.chains import ChainNode, Key
from compiler.plan.actions.lanes import Jobs, OrderEnd, best_order, least_end, run_of
from runtime.contract.names import ActionName

# --- Orders of jobs that a search has found, stored by everything that decides them: the next build need not search
#
# An entry is a file `orders/<key>.json` of a cache (compiler/files/cache.py), and as safe as those of segments. Its key
# is the digest of the jobs, the source of the search, and the version of Python, whose random numbers it draws. An
# order decides how long actions take, and no more: the program it goes into is proven all the same.

FOLDER = "orders"
Order = tuple[int, ...]


@dataclass
class Orders:
    """The best orders of jobs: from the entries of a cache, there or not, or by search.

    folder: the cache; None: nothing is looked up, and nothing is there to store. entries: path → text, of all jobs that
    were asked for.
    """

    folder: Path | None = None
    entries: dict[str, str] = field(default_factory=dict, init=False)
    _found: dict[Jobs, Order] = field(default_factory=dict, init=False)

    def best(self, jobs: Jobs) -> Order:
        """The best order, from the cache or by search."""
        if self.folder is None:
            return best_order(jobs)
        if jobs not in self._found:
            key = self.key_of(jobs)
            text = text_of(self.folder / FOLDER, key)
            order = read(text, key, jobs) if text is not None else None
            self._found[jobs] = order = best_order(jobs) if order is None else order
            self.entries[f"{FOLDER}/{key}.json"] = entry(key, order)
        return self._found[jobs]

    def key_of(self, jobs: Jobs) -> str:
        """A digest that tells any two lists of jobs apart."""
        return _digest(json.dumps([astuple(jobs), self._tools]))

    @cached_property
    def _tools(self) -> list[object]:
        """What decides an order beside the jobs: the digest of its source, and the version of Python."""
        return [hashlib.sha256(Path(lanes.__file__).read_bytes()).hexdigest(), sys.version_info[:3]]


def entry(key: str, order: Order) -> str:
    """The text of an entry; `read` is its inverse."""
    return json.dumps({"key": key, "sha256": _digest(json.dumps(order)), "order": order}) + "\n"


def read(text: str, key: str, jobs: Jobs) -> Order | None:
    """The order that an entry holds; None where it is not whole, not of this key, or no order of the jobs."""
    try:
        order = tuple(map(int, json.loads(text)["order"]))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    if sorted(order) != list(range(len(jobs))) or entry(key, order) != text:
        return None
    place = {job: at for at, job in enumerate(order)}
    right = all(place[other] < place[job] for job, earlier in enumerate(jobs.after) for other in earlier)
    return order if right else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- order

Placed = tuple[int, ChainNode]  # (slot, node)


def interleave(chains: Sequence[Sequence[ChainNode]], orders: Orders) -> list[Placed]:
    """One order of all instructions, the slot beside each. Deterministic; the order depends on nodes alone."""
    placed = [(slot, node) for slot, chain in enumerate(chains) for node in chain]
    held = [each for each in placed if each[1].ordered]
    jobs = jobs_of(chains)
    order = _early_exchanges(jobs, orders.best(jobs))
    beside = [each for each in placed if not each[1].ordered]
    return _with_beside([held[job] for job in order], beside)


def jobs_of(chains: Sequence[Sequence[ChainNode]]) -> Jobs:
    """The segments and exchanges of chains that are ordered together."""
    held = [(slot, node) for slot, chain in enumerate(chains) for node in chain if node.ordered]
    maker = {(slot, buffer.name): job for job, (slot, node) in enumerate(held) for buffer in node.writes}
    place = {(slot, *node.key): job for job, (slot, node) in enumerate(held)}
    adding: dict[str, list[int]] = defaultdict(list)  # by tensor, or by what is scattered
    after: list[set[int]] = []
    for job, (slot, node) in enumerate(held):
        i = node.instruction
        after.append({maker[slot, name] for name in i.reads if (slot, name) in maker})
        after[job] |= {place[slot, *key] for key in node.after}
        if i.phase == "W":
            for name in (f"scatter {i.site}",) if i.kind == "scatter" else i.params:
                adding[name].append(job)
    awaits = [{other for other in earlier if held[other][1].exchanges} for earlier in after]
    for first, second in (pair for group in adding.values() for pair in pairwise(group)):
        after[second].add(first)
    time, between = paces([node for _, node in held], len(chains))
    return Jobs(
        time=time,
        between=() if between == time else between,
        exchange=tuple(node.exchanges for _, node in held),
        slot=tuple(slot for slot, _ in held),
        early=tuple(node.key[:2] == ("run", "W") for _, node in held),  # the last reader of what a forward saved
        after=tuple(tuple(sorted(earlier)) for earlier in after),
        awaits=tuple(tuple(sorted(exchanges)) for exchanges in awaits),
    )


def paces(nodes: Sequence[ChainNode], num_actions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nanoseconds of the segments and exchanges of an action or a pair, beside an exchange and without.

    A pair exchanges nearly all the time, and two micro-batches are computed to hide it: its segments have the SMs that
    exchanges leave throughout. Where nothing is exchanged, all have all SMs.
    """
    if not any(node.exchanges for node in nodes):
        alone = tuple([node.alone_ns for node in nodes])
        return alone, alone
    beside = tuple([node.time_ns for node in nodes])
    return beside, tuple([node.between_ns for node in nodes]) if num_actions == 1 else beside


def _early_exchanges(jobs: Jobs, order: Sequence[int]) -> list[int]:
    """The order with every exchange as early as its operands and the exchanges before it let it be: none ends later.

    An exchange that reads another's result stays where it is: it would be waited for earlier.
    """
    result: list[int] = []
    for job in order:
        at = len(result)
        if jobs.exchange[job] and not jobs.awaits[job]:
            stay = set(jobs.after[job])
            while at and result[at - 1] not in stay and not jobs.exchange[result[at - 1]]:
                at -= 1
        result.insert(at, job)
    return result


def _with_beside(order: Sequence[Placed], beside: Sequence[Placed]) -> list[Placed]:
    """Put in what takes no time: a receive right before its first reader, a send right behind its operand."""
    makers = {(slot, b.name) for slot, node in order for b in node.writes}
    waiting = {(slot, b.name): (slot, node) for slot, node in beside for b in node.writes}
    giving: dict[tuple[int, str], list[Placed]] = defaultdict(list)
    for slot, node in beside:
        for name in node.instruction.reads:
            assert (slot, name) in makers, f"{node.instruction.kind} reads {name}, which no segment makes"
            giving[slot, name].append((slot, node))
    result: list[Placed] = []
    for slot, node in order:
        for name in node.instruction.reads:
            if (slot, name) in waiting:
                result.append(waiting.pop((slot, name)))
        result.append((slot, node))
        for buffer in node.writes:
            result += giving[slot, buffer.name]
    return [*waiting.values(), *result]


def finish(
    order: Sequence[Placed], actions: Sequence[ActionName], read_later: Sequence[frozenset[str]]
) -> tuple[Instruction, ...]:
    """Insert waits and frees. `read_later[slot]`: values that later actions of its stage and micro-batch read."""
    waited = _with_waits(order, actions)
    last: dict[tuple[int, str], int] = {}
    for index, instruction in enumerate(waited):
        names = (*instruction.reads, *(b.name for b in instruction.writes))
        last |= {(instruction.slot, name): index for name in names if name not in read_later[instruction.slot]}
    result: list[Instruction] = []
    for index, instruction in enumerate(waited):
        result.append(instruction)
        names = (*instruction.reads, *(b.name for b in instruction.writes))
        dead = tuple(dict.fromkeys(n for n in names if last.get((instruction.slot, n)) == index))
        if dead:
            free = Instruction("free", instruction.slot, instruction.action, instruction.phase, reads=dead)
            result.append(free)
    return tuple(result)


def _with_waits(order: Sequence[Placed], actions: Sequence[ActionName]) -> list[Instruction]:
    """The instructions with the waits of exchanges: each where something first needs its end, or at the end.

    A scatter that is waited for has all earlier ones waited for: what they give is added in the order of their starts.
    """
    result: list[Instruction] = []
    pending: dict[tuple[int, Key], tuple[Instruction, ChainNode]] = {}  # exchanges that are under way, by slot
    makers: dict[tuple[int, str], tuple[int, Key]] = {}  # (slot, awaited value) → its exchange

    def is_scatter(key: tuple[int, Key]) -> bool:
        return key[1][0] == "scatter"

    def wait(key: tuple[int, Key]) -> None:
        start, node = pending.pop(key)
        result.append(replace(start, kind="wait", wait=start.kind, writes=node.writes))

    for slot, node in order:
        needed = [(slot, key) for key in node.after]
        needed += [makers[slot, name] for name in node.instruction.reads if (slot, name) in makers]
        for key in needed:
            scatters = [each for each in pending if is_scatter(each)]
            ended = scatters[: scatters.index(key) + 1] if key in scatters else [key]
            for each in ended:
                if each in pending:
                    wait(each)
        instruction = replace(node.instruction, slot=slot, action=actions[slot])
        result.append(instruction)
        if node.exchanges:
            pending[slot, node.key] = instruction, node
            makers |= {(slot, b.name): (slot, node.key) for b in node.writes}
    while pending:
        wait(next(iter(pending)))
    return result


# --- What an action or a pair takes: its jobs in their best order over the two lanes, and its messages on the link
#
# What an action sends to another rank is on the links behind the exchanges before it, and the action ends when it is
# there: a rank sends, and does nothing else meanwhile than what stands behind the message in its own action or pair. So
# the published pipelines do it: Megatron-LM (megatron/core/pipeline_parallel/p2p_communication.py), torch
# (torch/distributed/pipelining/schedules.py) and DualPipe (dualpipe.py, _commit_and_wait_comm) put the messages of a
# step into one batch and wait for all of it before they compute on. Links carry both directions at once, so what a rank
# receives costs it nothing beside what it sends.
Chain = Sequence[ChainNode]


def run_of_chains(chains: Sequence[Chain], sends_ns: Sequence[int], orders: Orders) -> OrderEnd:
    """An action, or a pair, in its best order. `sends_ns`: how long the message of each is on the link; 0: it sends
    none to another rank."""
    jobs = jobs_of(chains)
    return run_of(jobs, orders.best(jobs), _behind(chains, sends_ns))


def least_of_chains(chains: Sequence[Chain], sends_ns: Sequence[int]) -> OrderEnd:
    """The least that an action, or a pair, takes in any order, and that each lane is busy."""
    jobs = jobs_of(chains)
    end = least_end(jobs, _behind(chains, sends_ns))
    return OrderEnd(end, jobs.total(exchange=False), jobs.total(exchange=True) + sum(sends_ns))


def _behind(chains: Sequence[Chain], sends_ns: Sequence[int]) -> Mapping[int, int]:
    """How long the message behind a job is on the link, by the job that makes what is sent."""
    if not any(sends_ns):
        return {}
    held = [(slot, node) for slot, chain in enumerate(chains) for node in chain if node.ordered]
    maker = {(slot, buffer.name): job for job, (slot, node) in enumerate(held) for buffer in node.writes}
    found: dict[int, int] = {}
    for slot, (chain, time_ns) in enumerate(zip(chains, sends_ns, strict=True)):
        for node in chain if time_ns else ():
            if node.instruction.kind == "send":
                found[maker[slot, node.instruction.reads[0]]] = time_ns
    return found

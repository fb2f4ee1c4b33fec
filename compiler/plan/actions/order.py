"""Chains → one instruction list over a compute lane and a communication lane.

`Orders.best` orders the segments and exchanges. A lone backward fills the time of an all-to-all with weight gradients
and the shared expert. A pair of two independent actions hides the exchanges of one micro-batch under the compute of the
other. An exchange starts as soon as its operands exist and the exchanges before it have started. The wait for it, and a
receive, come right before the first reader. A send follows its operand at once, and nothing waits for it.

Segments that add to the same gradient keep their base order, slot by slot, so results do not depend on the rates of a
device.
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
from compiler.plan.actions import compiled, lanes, search
from compiler.plan.actions.chains import AXES, Axis, ChainNode, Key
from compiler.plan.actions.lanes import Jobs, OrderEnd, exposed_of, least_end, run_of
from compiler.plan.actions.search import best_order
from runtime.contract.names import ActionName

# --- A cache of orders that a search has found, so that the next build need not search again
#
# An entry is a file `orders/<key>.json` of a cache (compiler/files/cache.py), and as safe as those of segments. Its key
# is a digest of the jobs, the source of the search, and the version of Python, whose random numbers it draws. An order
# only decides how long actions take: the program that uses it is proven in any case.

FOLDER = "orders"
Order = tuple[int, ...]


@dataclass
class Orders:
    """The best orders of jobs, from a cache or by search."""

    folder: Path | None = None  # the cache; None: nothing is looked up or stored
    found: Mapping[Jobs, Order] = field(default_factory=dict)  # known before, whether or not there is a better one
    entries: dict[str, str] = field(default_factory=dict, init=False)  # path → text, of all jobs that were asked for
    _orders: dict[Jobs, Order] = field(default_factory=dict, init=False)

    def best(self, jobs: Jobs) -> Order:
        """The order that is known, or else the best one, from the cache or by search."""
        if jobs in self.found:
            return self.found[jobs]
        if self.folder is None:
            return best_order(jobs)
        if jobs not in self._orders:
            key = self.key_of(jobs)
            text = text_of(self.folder / FOLDER, key)
            order = read(text, key, jobs) if text is not None else None
            self._orders[jobs] = order = best_order(jobs) if order is None else order
            self.entries[f"{FOLDER}/{key}.json"] = entry(key, order)
        return self._orders[jobs]

    def key_of(self, jobs: Jobs) -> str:
        """A digest that differs for any two different jobs."""
        return _digest(json.dumps([astuple(jobs), self._tools]))

    @cached_property
    def _tools(self) -> list[object]:
        """The digest of the search's source and the version of Python. An order depends on them and the jobs."""
        sources = (
            Path(path).read_bytes() for path in (lanes.__file__, search.__file__, compiled.__file__, compiled.SOURCE)
        )
        return [hashlib.sha256(b"\0".join(sources)).hexdigest(), sys.version_info[:3]]


def entry(key: str, order: Order) -> str:
    """The text of an entry; `read` is its inverse."""
    return json.dumps({"key": key, "sha256": _digest(json.dumps(order)), "order": order}) + "\n"


def read(text: str, key: str, jobs: Jobs) -> Order | None:
    """The order in an entry; None if it is damaged, has another key, or is no valid order of the jobs."""
    try:
        order = tuple(map(int, json.loads(text)["order"]))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    if sorted(order) != list(range(len(jobs))) or entry(key, order) != text:
        return None
    place = {job: position for position, job in enumerate(order)}
    is_valid = all(place[predecessor] < place[job] for job, earlier in enumerate(jobs.after) for predecessor in earlier)
    return order if is_valid else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- order

Placed = tuple[int, ChainNode]  # (slot, node)


def interleave(chains: Sequence[Sequence[ChainNode]], orders: Orders) -> list[Placed]:
    """One order of all instructions, each with its slot. Deterministic; the order depends only on the nodes."""
    placed = [(slot, node) for slot, chain in enumerate(chains) for node in chain]
    nodes = [pair for pair in placed if pair[1].uses_lane]
    jobs = jobs_of(chains)
    order = _early_exchanges(jobs, orders.best(jobs))
    beside = [pair for pair in placed if not pair[1].uses_lane]
    return _insert_instant_instructions([nodes[job] for job in order], beside)


def jobs_of(chains: Sequence[Sequence[ChainNode]]) -> Jobs:
    """The segments and exchanges of chains that are ordered together."""
    nodes = [(slot, node) for slot, chain in enumerate(chains) for node in chain if node.uses_lane]
    maker = {(slot, buffer.name): job for job, (slot, node) in enumerate(nodes) for buffer in node.writes}
    place = {(slot, *node.key): job for job, (slot, node) in enumerate(nodes)}
    adding: dict[str, list[int]] = defaultdict(list)  # jobs that add to a tensor, or to scattered gradients of a site
    after: list[set[int]] = []
    for job, (slot, node) in enumerate(nodes):
        i = node.instruction
        after.append({maker[slot, name] for name in i.reads if (slot, name) in maker})
        after[job] |= {place[slot, *key] for key in node.after}
        if i.phase == "W":
            for name in (f"scatter {i.site}",) if i.kind == "scatter" else i.params:
                adding[name].append(job)
    awaits = [{predecessor for predecessor in earlier if nodes[predecessor][1].is_exchange} for earlier in after]
    for first, second in (pair for group in adding.values() for pair in pairwise(group)):
        after[second].add(first)
    time, between = paces([node for _, node in nodes], len(chains))
    return Jobs(
        time=time,
        between=() if between == time else between,
        exchange=tuple(node.is_exchange for _, node in nodes),
        slot=tuple(slot for slot, _ in nodes),
        early=tuple(
            node.key[:2] == ("run", "W") for _, node in nodes
        ),  # the last reader of values that a forward saved
        after=tuple(tuple(sorted(earlier)) for earlier in after),
        awaits=tuple(tuple(sorted(exchanges)) for exchanges in awaits),
    )


def paces(nodes: Sequence[ChainNode], num_actions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nanoseconds of the segments and exchanges of an action or a pair: beside an exchange, and while none runs.

    A pair exchanges nearly all the time, so its segments count as having only the SMs that exchanges leave. In an
    action without exchanges, segments have all SMs.
    """
    if not any(node.is_exchange for node in nodes):
        alone = tuple([node.alone_ns for node in nodes])
        return alone, alone
    beside = tuple([node.time_ns for node in nodes])
    return beside, tuple([node.between_ns for node in nodes]) if num_actions == 1 else beside


def _early_exchanges(jobs: Jobs, order: Sequence[int]) -> list[int]:
    """The order with each exchange as early as its operands and the exchanges before it allow. No exchange ends later.

    An exchange that reads another's result stays, as moving it would also move its wait for the other one.
    """
    result: list[int] = []
    for job in order:
        position = len(result)
        if jobs.exchange[job] and not jobs.awaits[job]:
            stay = set(jobs.after[job])
            while position and result[position - 1] not in stay and not jobs.exchange[result[position - 1]]:
                position -= 1
        result.insert(position, job)
    return result


def _insert_instant_instructions(order: Sequence[Placed], beside: Sequence[Placed]) -> list[Placed]:
    """Insert instructions that take no time: receives before their first reader, sends right after their operand."""
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
    """Insert waits and frees. `read_later[slot]`: values that later actions of the stage and micro-batch read."""
    waited = _insert_waits(order, actions)
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


def _insert_waits(order: Sequence[Placed], actions: Sequence[ActionName]) -> list[Instruction]:
    """The instructions with the waits for exchanges: each before the first instruction that needs it, or at the end.

    A wait for a scatter comes after waits for all earlier ones, so that results are added in the order of their starts.
    """
    result: list[Instruction] = []
    pending: dict[tuple[int, Key], tuple[Instruction, ChainNode]] = {}  # exchanges in progress, by slot and key
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
            scatters = [exchange for exchange in pending if is_scatter(exchange)]
            ended = scatters[: scatters.index(key) + 1] if key in scatters else [key]
            for exchange in ended:
                if exchange in pending:
                    wait(exchange)
        instruction = replace(node.instruction, slot=slot, action=actions[slot])
        result.append(instruction)
        if node.is_exchange:
            pending[slot, node.key] = instruction, node
            makers |= {(slot, b.name): (slot, node.key) for b in node.writes}
    while pending:
        wait(next(iter(pending)))
    return result


# --- The time of an action or a pair: its jobs in their best order over the two lanes, and its messages on the links
#
# A message to another rank is on the links after the exchanges before it, and the action ends when the message has
# arrived. Meanwhile the rank runs only the rest of its own action or pair. Published pipelines work this way:
# Megatron-LM (megatron/core/pipeline_parallel/p2p_communication.py), torch (torch/distributed/pipelining/schedules.py)
# and DualPipe (dualpipe.py, _commit_and_wait_comm) put the messages of a step into one batch and wait for all of it
# before they go on. Links carry both directions at once, so receiving takes no time beside sending.
Chain = Sequence[ChainNode]


def run_of_chains(chains: Sequence[Chain], sends_ns: Sequence[int], orders: Orders) -> OrderEnd:
    """Run an action or a pair in its best order.

    `sends_ns`: time of each action's message on the link; 0 if it sends none to another rank.
    """
    jobs = jobs_of(chains)
    return run_of(jobs, orders.best(jobs), _behind(chains, sends_ns))


SWING = 0.2  # exchanges are made this much shorter and longer, to see how far the end follows


@dataclass(frozen=True, slots=True)
class ActionLanes:
    """How an action or a pair uses its lanes, in nanoseconds."""

    run: OrderEnd
    busy: Mapping[Axis, int]  # of the communication lane, by the ranks that exchange
    exposed: Mapping[Axis, int]  # the part of it in which compute has nothing to do
    slope: Mapping[Axis, float]  # how far the end would move if the exchanges of an axis took twice as long


def lanes_of_chains(chains: Sequence[Chain], sends_ns: Sequence[int], orders: Orders) -> ActionLanes:
    """How an action or a pair uses its lanes in its best order. Arguments as for `run_of_chains`."""
    jobs, sends = jobs_of(chains), _behind(chains, sends_ns)
    order = orders.best(jobs)
    shown = exposed_of(jobs, order, sends)
    of_axis = defaultdict[Axis, set[int]](set)
    for job, node in enumerate(node for chain in chains for node in chain if node.uses_lane):
        if node.is_exchange:
            of_axis[AXES[node.instruction.kind]].add(job)
    busy: dict[Axis, int] = {axis: sum(jobs.time[job] for job in exchanges) for axis, exchanges in of_axis.items()}
    exposed = {axis: sum(shown.exchanges[job] for job in exchanges) for axis, exchanges in of_axis.items()}
    slope: dict[Axis, float] = {}
    for axis, exchanges in of_axis.items():
        faster, slower = (run_of(jobs.longer(exchanges, 1 + change), order, sends).end for change in (-SWING, SWING))
        slope[axis] = (slower - faster) / (2 * SWING)
    if sends:
        busy["pipeline"], exposed["pipeline"] = sum(sends.values()), shown.messages
        changed = ({job: round(time * (1 + change)) for job, time in sends.items()} for change in (-SWING, SWING))
        faster, slower = (run_of(jobs, order, messages).end for messages in changed)
        slope["pipeline"] = (slower - faster) / (2 * SWING)
    return ActionLanes(run_of(jobs, order, sends), busy, exposed, slope)


def least_of_chains(chains: Sequence[Chain], sends_ns: Sequence[int]) -> OrderEnd:
    """A lower bound of the time of an action or a pair in any order, and the time for which each lane is busy."""
    jobs = jobs_of(chains)
    end = least_end(jobs, _behind(chains, sends_ns))
    return OrderEnd(end, jobs.total(exchange=False), jobs.total(exchange=True) + sum(sends_ns))


def _behind(chains: Sequence[Chain], sends_ns: Sequence[int]) -> Mapping[int, int]:
    """By the job that produces a message, the time of the message on the link."""
    if not any(sends_ns):
        return {}
    nodes = [(slot, node) for slot, chain in enumerate(chains) for node in chain if node.uses_lane]
    maker = {(slot, buffer.name): job for job, (slot, node) in enumerate(nodes) for buffer in node.writes}
    sends: dict[int, int] = {}
    for slot, (chain, time_ns) in enumerate(zip(chains, sends_ns, strict=True)):
        for node in chain if time_ns else ():
            if node.instruction.kind == "send":
                sends[maker[slot, node.instruction.reads[0]]] = time_ns
    return sends

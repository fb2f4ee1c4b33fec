"""What an action or a pair takes: its jobs in their best order over the two lanes, and its messages on the link.

What an action sends to another rank is on the links behind the exchanges before it, and the action ends when it is
there: a rank sends, and does nothing else meanwhile than what stands behind the message in its own action or pair. So
the published pipelines do it: Megatron-LM (megatron/core/pipeline_parallel/p2p_communication.py), torch
(torch/distributed/pipelining/schedules.py) and DualPipe (dualpipe.py, _commit_and_wait_comm) put the messages of a step
into one batch and wait for all of it before they compute on. Links carry both directions at once, so what a rank
receives costs it nothing beside what it sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.plan.actions.lanes import Run, least_end, run_of
from compiler.plan.actions.node import Node
from compiler.plan.actions.order import jobs_of
from compiler.plan.actions.order_cache import Orders

Chain = Sequence[Node]


def run_of_chains(chains: Sequence[Chain], sends_ns: Sequence[int], orders: Orders) -> Run:
    """An action, or a pair, in its best order. `sends_ns`: how long the message of each is on the link; 0: it sends
    none to another rank."""
    jobs = jobs_of(chains)
    return run_of(jobs, orders.best(jobs), _behind(chains, sends_ns))


def least_of_chains(chains: Sequence[Chain], sends_ns: Sequence[int]) -> Run:
    """The least that an action, or a pair, takes in any order, and that each lane is busy."""
    jobs = jobs_of(chains)
    end = least_end(jobs, _behind(chains, sends_ns))
    return Run(end, jobs.total(exchange=False), jobs.total(exchange=True) + sum(sends_ns))


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

"""How long the host takes from the row counts of a dispatch until all of its transfers are enqueued.

    python -m benchmarks.host_read [--rounds 200]

Nothing is sent. A device that waits for this dispatch is idle for this time, unless other work was enqueued before.
Each rank has four experts, as in DeepSeek-V3, and few tokens, so that copies take little time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from runtime.comm.exchange import HostReads, RankExchange, RankRoute
from runtime.comm.nodes import Hops, NodeExchange, NodePlace, NodeRoute
from runtime.comm.transport import RowLayout, Rows, Work
from runtime.contract.names import ExchangeName

NODES, ON_NODE, EXPERTS, ALIGNMENT = 8, 8, 4, 128
ROWS, COLUMNS = 2, 16  # rows per expert and source
CPU = torch.device("cpu")
DISPATCH = ExchangeName("dispatch F0.0@L0")


class SendsNothing:
    """A swap that has ended when it starts."""

    def start(self, name: str, outgoing: Rows, incoming: Rows) -> list[Work]:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for route, seconds in (("eight ranks of a node", to_ranks), ("eight nodes of eight ranks", by_nodes)):
        times = [1e3 * seconds() for _ in range(rounds)]
        print(f"{route}: {statistics.median(times):.2f} ms, the median of {rounds}; the fastest {min(times):.2f} ms")


def to_ranks() -> float:
    """The seconds of one dispatch that sends each row by itself."""
    swap, counts = SendsNothing(), ((ROWS,) * EXPERTS,) * ON_NODE
    exchange = RankExchange(swap, swap, ON_NODE, HostReads(CPU), ALIGNMENT)
    tensors = values_of(ON_NODE * EXPERTS * ROWS)
    start = time.perf_counter()
    layout = RowLayout(counts, ALIGNMENT)
    exchange.start(DISPATCH, tensors, RankRoute(layout.num_rows, layout.of_members, layout), forward=True)
    exchange.wait(DISPATCH)
    return time.perf_counter() - start


def by_nodes() -> float:
    """The seconds of one dispatch over two hops."""
    ranks = NODES * ON_NODE
    place = NodePlace(size=ranks, nodes=NODES, node=0, tokens=ranks * EXPERTS * ROWS)
    hops = Hops(SendsNothing(), SendsNothing())
    exchange = NodeExchange(hops, hops, place, HostReads(CPU), ALIGNMENT)
    index = torch.zeros(place.tokens, dtype=torch.int64)
    tensors = (*values_of(place.tokens), index, torch.stack([index, index]))
    start = time.perf_counter()
    layout = RowLayout(((ROWS,) * EXPERTS,) * ranks, ALIGNMENT, place.columns)
    to_nodes, to_ranks = (place.tokens // NODES,) * NODES, ((place.tokens // ranks,) * NODES,) * ON_NODE
    route = NodeRoute(layout.num_rows, to_nodes, layout, to_nodes, to_nodes, to_ranks)
    exchange.start(DISPATCH, tensors, route, forward=True)
    exchange.wait(DISPATCH)  # enqueues the second hop; on a device, `start` does
    return time.perf_counter() - start


def values_of(rows: int) -> tuple[Tensor, ...]:
    """E4M3 rows, their scales and their gate weights."""
    return torch.ones(rows, COLUMNS).to(torch.float8_e4m3fn), torch.ones(2, rows).t(), torch.ones(rows)


if __name__ == "__main__":
    main()

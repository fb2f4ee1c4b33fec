"""The text of `dsc place`: the balance of each layer before and after, its gap to the bound, and the moves."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from rich.style import Style
from rich.table import Table
from rich.text import Text

from compiler.plan.experts.layer_search import GroupRule
from compiler.plan.experts.place_layers import LayerRow, TokenTraffic, overall
from compiler.tools.picture.drawing import Screen
from compiler.tools.picture.palette import DARK
from compiler.tools.picture.terminal import console_of, text_of_console

NARROWEST, WIDEST, SHOWN = 72, 160, 8
RULES = {
    "auto": "each group on one node if that costs at most 1% and is no worse than the greedy algorithm",
    "keep": "each group on one node",
    "ignore": "experts of a group on any nodes",
}


def text(rows: Sequence[LayerRow], rule: GroupRule, written: str | None, screen: Screen | None = None) -> str:
    """Return the text, with escape codes if the screen has colours. `written`: the file of the placement, if any."""
    screen = screen or Screen()
    width = min(max(screen.width, NARROWEST), WIDEST)
    console = console_of(screen, width)
    for part in (*_head(rows), _table(rows), *_notes_after_table(rows, rule, written, width)):
        console.print(part)
    return "\n".join(line.rstrip() for line in text_of_console(console, screen).splitlines()) + "\n"


def _quiet_style() -> Style:
    return Style(color=DARK.quiet)


def _bold(words: str, note: str = "") -> Text:
    return Text(words, style=Style(bold=True)).append(f"  {note}" if note else "", style=Style(bold=False))


def _head(rows: Sequence[LayerRow]) -> Iterator[Text]:
    layouts = list(dict.fromkeys(row.layout for row in rows))
    for layout in layouts:
        count = sum(row.layout == layout for row in rows)
        devices = f"{layout.devices} devices" + (f" in {layout.nodes} nodes" if layout.nodes > 1 else "")
        groups = f" in {layout.groups} groups" if layout.groups > 1 else ""
        yield _bold(
            f"{count} layer{'s' * (count > 1)}",
            f"{layout.experts} experts{groups} on {devices}, {layout.slots} on each",
        )
    yield Text()


def _table(rows: Sequence[LayerRow]) -> Table:
    """A row per layer. A balance is the load of the busiest device or node over the mean."""
    with_nodes = any(row.layout.nodes > 1 for row in rows)
    with_groups = any(row.layout.groups > 1 and row.layout.nodes > 1 for row in rows)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=_quiet_style(), pad_edge=False)
    heads = ["layer", "device now", "greedy", "placed", "above bound"]
    heads += [*(["node now", "node placed"] if with_nodes else []), *(["groups"] if with_groups else []), "moved"]
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index and head != "groups" else "left", no_wrap=True)
    for row in rows:
        placement = row.placement
        cells = [Text(row.layer), _number(row.before.device)]
        better = placement.balance.device < placement.greedy.device - 5e-4
        cells += [
            Text(f"{placement.greedy.device:.3f}", style=_quiet_style()),
            Text(f"{placement.balance.device:.3f}", style=Style(bold=True, color=DARK.accent if better else None)),
            Text("best" if placement.gap < 1e-6 else f"{placement.gap:.2%}" if placement.gap >= 5e-5 else "<0.01%"),
        ]
        if with_nodes:
            cells += [_number(row.before.node), _number(placement.balance.node)]
        if with_groups:
            cells.append(Text("whole" if placement.keeps_groups else "split", style=_quiet_style()))
        table.add_row(*cells, Text(str(len(row.moved))))
    return table


def _number(value: float) -> Text:
    return Text(f"{value:.3f}")


def _notes_after_table(rows: Sequence[LayerRow], rule: GroupRule, written: str | None, width: int) -> Iterator[Text]:
    total = overall(rows)
    yield Text()
    yield _bold(
        "all layers",
        f"{total.before:.3f} → {total.after:.3f} of the mean, if each layer waits for its busiest device; greedy "
        f"{total.greedy:.3f}, lower bound {total.bound:.3f}",
    )
    yield from _traffic(rows)
    if total.groups_whole is not None:
        yield from _unsplit_groups(rows, total.groups_whole)
    yield from _moves(rows, written)
    yield Text()
    notes = []
    if any(row.layout.groups > 1 and row.layout.nodes > 1 for row in rows):
        notes.append(f"--group-rule {rule}: {RULES[rule]}")
    if any(row.traffic for row in rows):
        notes.append(
            "bytes: a token is sent once to a node, and there once to each device. A load does not record which "
            "experts are chosen together: groups are chosen by their load, and experts in them independently"
        )
    for note in notes:
        yield from (
            Text(f"{'· ' if not index else '  '}{part}", style=_quiet_style())
            for index, part in enumerate(textwrap.wrap(note, width - 2))
        )


def _traffic(rows: Sequence[LayerRow]) -> Iterator[Text]:
    """Bytes per token, averaged over layers."""
    traffics = [row.traffic for row in rows if row.traffic is not None]
    if not traffics:
        return

    def change(before: Callable[[TokenTraffic], float], after: Callable[[TokenTraffic], float]) -> str:
        """The bytes of these copies, as `61.2 KB → 57.0 KB`."""
        mean_bytes = (
            sum(copies(traffic) * traffic.copy_bytes for traffic in traffics) / len(traffics)
            for copies in (before, after)
        )
        return " → ".join(map(_bytes, mean_bytes))

    if max(traffic.nodes for traffic in traffics) > 1:
        between = change(
            lambda traffic: traffic.to_nodes_before.over_links(traffic.nodes),
            lambda traffic: traffic.to_nodes.over_links(traffic.nodes),
        )
        yield _bold("between nodes", f"{between} per token and layer, there and back; {_range(traffics)}")
        busiest = change(
            lambda traffic: traffic.to_nodes_before.busiest * _away(traffic),
            lambda traffic: traffic.to_nodes.busiest * _away(traffic),
        )
        yield _bold("busiest node", f"{busiest} per token and layer")
    to_devices = change(lambda traffic: traffic.to_devices_before.expected, lambda traffic: traffic.to_devices.expected)
    yield _bold("to devices", f"{to_devices} per token and layer")
    busiest = change(lambda traffic: traffic.to_devices_before.busiest, lambda traffic: traffic.to_devices.busiest)
    yield _bold("busiest device", f"{busiest} per token and layer")


def _away(traffic: TokenTraffic) -> float:
    """The share of copies to nodes that go to another node than the token's, if tokens start evenly on all nodes."""
    return (traffic.nodes - 1) / traffic.nodes


def _unsplit_groups(rows: Sequence[LayerRow], balance: float) -> Iterator[Text]:
    """The balance and traffic if no group is split."""
    split = sum(row.groups_whole is not None for row in rows)
    traffics = [row.traffic for row in rows if row.traffic is not None]
    copies = [(traffic, traffic.to_nodes_groups_whole or traffic.to_nodes) for traffic in traffics]
    sent = sum(to_nodes.over_links(traffic.nodes) * traffic.copy_bytes for traffic, to_nodes in copies)
    between = f", {_bytes(sent / len(traffics))} between nodes" if traffics else ""
    words = f"{balance:.3f} of the mean{between}: --group-rule keep; here {split} layers have split groups"
    yield _bold("groups whole", words)


def _range(traffics: Sequence[TokenTraffic]) -> str:
    """Bounds of the traffic, whichever experts are chosen together."""
    low = sum(traffic.to_nodes.lower * _away(traffic) * traffic.copy_bytes for traffic in traffics)
    high = sum(traffic.to_nodes.upper * _away(traffic) * traffic.copy_bytes for traffic in traffics)
    return f"always {_bytes(low / len(traffics))} to {_bytes(high / len(traffics))}"


def _bytes(value: float) -> str:
    return f"{value / 1e3:.1f} KB" if value >= 1e3 else f"{value:.0f} B"


def _moves(rows: Sequence[LayerRow], written: str | None) -> Iterator[Text]:
    moved = [(row.layer, move) for row in rows for move in row.moved]
    if moved:
        yield Text()
        yield _bold(f"{len(moved):,} move{'s' * (len(moved) > 1)}")
        yield from (Text(f"  {layer}: {move}") for layer, move in moved[:SHOWN])
        if len(moved) > SHOWN:
            yield Text(f"  … and {len(moved) - SHOWN:,} more" + ("" if written else ": -o FILE writes all"))
    else:
        yield Text()
        yield _bold("no moves", "the present placement is as good")
    if written:
        yield Text()
        yield _bold("written", written)

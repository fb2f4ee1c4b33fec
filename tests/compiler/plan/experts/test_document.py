"""The file of a placement reads back as it was written; a file with a fault is refused with a clear message."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.ir.expert_placement import to_text
from compiler.plan.experts.layout import (
    ExpertLayout,
    PlacementError,
    align_placement,
    balance_of,
    default_placement,
    keeps_groups,
    moves,
)
from compiler.plan.experts.placement_file import layer_placement, physical_of, read_load, read_placement

LAYOUT = ExpertLayout(6, 1, 1, 3)
NOW = default_placement(LAYOUT)
NEW = np.array([0, 4, 2, 3, 1, 5])


def written() -> str:
    return to_text([layer_placement("layers.3", NEW, 3, moves(NOW, NEW, LAYOUT))])


def test_a_file_reads_back(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(written())
    layer = read_placement(tmp_path / "p.json")["layers.3"]
    assert layer.devices == ((0, 4), (2, 3), (1, 5))
    assert layer.moves == ("expert 1: device 0 → device 2", "expert 4: device 2 → device 0")
    assert physical_of(layer).tolist() == NEW.tolist() and layer.num_experts == 6
    assert to_text([layer]) == written()


def test_each_device_is_a_line() -> None:
    assert "\n    [0, 4],\n    [2, 3],\n    [1, 5]\n" in written()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(version=2), "version 2 is unknown"),
        (lambda d: d.update(more=1), "expected {"),
        (lambda d: d.update(layers=3), "`layers` must be a list"),
        (lambda d: d["layers"].append(d["layers"][0]), "layers.3 is listed twice"),
        (lambda d: d["layers"][0].update(layer="../x"), "is not the name of a layer"),
        (lambda d: d["layers"][0].update(devices=[]), "`devices` must be a list of the experts of each device"),
        (lambda d: d["layers"][0].update(devices=[[0, -1]]), "`devices` must be a list of the experts of each device"),
        (
            lambda d: d["layers"][0].update(devices=[[0, True]]),
            "`devices` must be a list of the experts of each device",
        ),
        (
            lambda d: d["layers"][0].update(devices=[[0, 10**9]]),
            "`devices` must be a list of the experts of each device",
        ),
        (lambda d: d["layers"][0]["devices"][0].append(5), "the same number of experts"),
        (lambda d: d["layers"][0].update(devices=[[0, 4], [2, 3], [0, 5]]), "expert 1 is on no device"),
        (lambda d: d["layers"][0].update(moves=[3]), "`moves` must be a list of strings"),
        (lambda d: d["layers"][0].update(moves=["rm -rf"]), "is not a move, such as"),
        (lambda d: d["layers"][0]["devices"].reverse(), "contradicts `devices`, which has expert 1 on another device"),
    ],
)
def test_invalid_placements_are_refused(tmp_path: Path, edit: Callable[[Any], None], message: str) -> None:
    document = json.loads(written())
    edit(document)
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(PlacementError, match=message):
        read_placement(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"load": [[1, 2], [3', "2: this is not JSON|:1:21: this is not JSON"),
        ("[[1, 2]]", "expected .* with one row per layer"),
        ('{"load": []}', "`load` has no layers"),
        ('{"load": [[]]}', "row 0 of `load` is not a list of tokens"),
        ('{"load": [[1], 5]}', "row 1 of `load` is not a list of tokens"),
        ('{"load": [[1, -2]]}', "row 0, expert 1: -2 tokens"),
        ('{"load": [[1, NaN]]}', "NaN is not a JSON number"),
        ('{"load": [[1, 1e999]]}', "row 0, expert 1: inf tokens"),
        ('{"load": [[1, true]]}', "row 0, expert 1: true is not a number"),
        ('{"load": [["7"]]}', 'row 0, expert 0: "7" is not a number'),
        ('{"load": [[1]], "load": [[2]]}', "`load` is given twice"),
        ("[" * 100_000, "nested too deep|not JSON"),
        ('{"load": [[' + "9" * 5000 + "]]}", "a number of 5,000 digits is too large"),
        ('{"load": [[' + "9" * 400 + "]]}", "row 0, expert 0: 9{40} tokens are not between 0 and 1e.18"),
        ('{"load": ' + json.dumps([[1]] * 5000) + "}", "5,000 layers are too many"),
    ],
)
def test_invalid_loads_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "l.json").write_text(text)
    with pytest.raises(PlacementError, match=message):
        read_load(tmp_path / "l.json")


def test_a_load_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "l.json").write_bytes(b'{"load": "\xff"}')
    with pytest.raises(PlacementError, match="is not text in UTF-8"):
        read_load(tmp_path / "l.json")
    with pytest.raises(PlacementError, match="is not a regular file"):
        read_load(tmp_path)


def test_devices_are_named_so_that_least_moves() -> None:
    """Shuffling the devices of a placement gives an equal placement."""
    layout = ExpertLayout(24, 4, 2, 6)
    random = np.random.default_rng(2)
    current = random.permutation(24)
    nodes = current.reshape(2, 3, 4)[random.permutation(2)]
    shuffled = np.stack([node[random.permutation(3)] for node in nodes]).reshape(-1)
    assert moves(current, align_placement(shuffled, current, layout), layout) == ()


def test_naming_devices_changes_no_load() -> None:
    layout, random = ExpertLayout(24, 4, 2, 6), np.random.default_rng(4)
    for _ in range(10):
        load = random.random(24)
        physical, current = random.permutation(24), random.permutation(24)
        named = align_placement(physical, current, layout)
        before, after = (astuple(balance_of(load, placement, layout)) for placement in (physical, named))
        assert after == pytest.approx(before)
        assert keeps_groups(named, layout) == keeps_groups(physical, layout)


def test_moves_turn_one_placement_into_the_other() -> None:
    random, layout = np.random.default_rng(1), ExpertLayout(12, 1, 1, 4)
    for _ in range(20):
        current, new = random.permutation(12), random.permutation(12)
        devices = [set(device) for device in current.reshape(4, 3).tolist()]
        for move in moves(current, new, layout):
            devices[move.source].remove(move.expert)
            devices[move.destination].add(move.expert)
        assert devices == [set(device) for device in new.reshape(4, 3).tolist()]

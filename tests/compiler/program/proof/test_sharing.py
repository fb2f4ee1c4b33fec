"""The columns that hold the same part of a parameter, compared with the mesh rank by rank."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest

from compiler.ir.holders import Holders, sharing
from runtime.contract import Mesh
from runtime.contract.mesh import OF_HOLDERS, columns_of_channel, word_of

MESHES = [
    Mesh(2, dp, ep, tp, 1, etp=etp, copies=copies)
    for dp, ep, tp, etp, copies in product((1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4))
    if dp % copies == 0 == dp // copies * tp % (ep * etp)
]


def test_columns_at_one_place_share_a_parameter() -> None:
    """A slice of an expert is at one place of the groups, an unsliced parameter at all places of its slices."""
    for mesh in MESHES:
        all_columns = range(mesh.columns)
        for first in all_columns:
            place, later = first % mesh.expert_group, all_columns[first:]
            of_slice = [c for c in later if c % mesh.expert_group == place]
            assert [*sharing(mesh, True, True, first)] == of_slice
            assert [*sharing(mesh, False, True, first)] == [c for c in later if (c - first) % mesh.tp == 0]
            assert [*sharing(mesh, False, False, first)] == [*later]
            if place % mesh.etp == 0:
                expected = [c for c in later if c % mesh.expert_group // mesh.etp == place // mesh.etp]
                columns = sharing(mesh, True, False, first)
                assert [*columns] == expected == [c for c in all_columns if c in columns], mesh
                assert columns.start == first and columns[-1] == expected[-1] and [*columns[1:]] == expected[1:]


@pytest.mark.parametrize(("is_expert", "split"), list(product((False, True), repeat=2)))
def test_holders_of_a_copy_and_of_a_shard(is_expert: bool, split: bool) -> None:
    """A copy is in neighbouring columns. Columns at one place of their copies keep the same shard."""
    for mesh in MESHES:
        width = mesh.shard_columns
        for first in range((mesh.etp if is_expert else mesh.tp) if split else 1):
            holders = Holders((0, 1), sharing(mesh, is_expert, split, first), mesh.columns)
            in_copy = [c for c in holders.columns if c < width]
            copy = holders.of_first_copy(mesh.copies)
            assert copy == Holders((0, 1), copy.columns, mesh.columns) and [*copy.columns] == in_copy
            assert holders.num_shards(mesh.copies) == len(in_copy)
            period = holders.period
            assert mesh.columns % period == 0
            assert all((c in holders.columns) == (c % period in holders.columns) for c in range(mesh.columns))
            for column in in_copy:
                alike = [rank for rank in holders if rank % width == column]
                assert [*holders.alike(mesh.copies, column)] == alike
            assert len(copy.on_rank(1)) * len(holders.alike(mesh.copies)) == len(holders)


def test_each_channel_of_holders_has_one_word() -> None:
    """A word has the columns that it is chosen for, and equal columns get equal words."""
    for mesh in MESHES:
        chosen: dict[tuple[int, ...], set[str | None]] = defaultdict(set)
        for word, column in product(OF_HOLDERS, range(mesh.columns)):
            columns = (*columns_of_channel(column, word, mesh),)
            chosen[columns].add(word_of(columns, mesh))
            found = word_of(columns, mesh)
            assert found is not None and (*columns_of_channel(columns[0], found, mesh),) == columns
        assert all(len(words) == 1 for words in chosen.values())
    assert word_of((0, 3), Mesh(1, 4, 1, 1, 1)) is None


def test_equal_holders_give_equal_ranges() -> None:
    """Adjacent holders equal a range, so that both give the same buckets and channels."""
    mesh = Mesh(1, 4, 1, 1, 1, etp=2)
    assert sharing(mesh, True, False) == sharing(mesh, False, False) == range(4)
    assert sharing(Mesh(1, 4, 2, 1, 1, etp=2), True, False) == range(2)
    assert [*Holders((0, 2), sharing(Mesh(1, 8, 2, 1, 1, etp=2), True, False, 2), 8)] == [2, 3, 6, 7, 18, 19, 22, 23]

"""The columns that hold the same part of a parameter, compared with the mesh rank by rank."""

from __future__ import annotations

from itertools import product

from compiler.ir.holders import Holders, sharing
from runtime.contract import Mesh

MESHES = [
    Mesh(2, dp, ep, tp, 1, etp=etp)
    for dp, ep, tp, etp in product((1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 4))
    if dp * tp % (ep * etp) == 0
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


def test_equal_holders_give_equal_ranges() -> None:
    """Adjacent holders equal a range, so that both give the same buckets and channels."""
    mesh = Mesh(1, 4, 1, 1, 1, etp=2)
    assert sharing(mesh, True, False) == sharing(mesh, False, False) == range(4)
    assert sharing(Mesh(1, 4, 2, 1, 1, etp=2), True, False) == range(2)
    assert [*Holders((0, 2), sharing(Mesh(1, 8, 2, 1, 1, etp=2), True, False, 2), 8)] == [2, 3, 6, 7, 18, 19, 22, 23]

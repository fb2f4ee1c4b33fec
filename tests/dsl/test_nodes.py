"""How expert-parallel groups and routing groups map to nodes, against brute-force counts."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from dsl.facts.devices import group_nodes, groups_fit_nodes, most_nodes_of_token


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.data())
def test_nodes_that_a_token_reaches(groups: int, nodes: int, each: int, data: st.DataObject) -> None:
    """Never fewer nodes than any choice of groups reaches; where groups align with nodes, exactly the maximum."""
    num_chosen, experts = data.draw(st.integers(1, groups)), groups * nodes * each
    node_of = [{e * nodes // experts for e in range(g * nodes * each, (g + 1) * nodes * each)} for g in range(groups)]
    largest = max(len(set().union(*chosen)) for chosen in combinations(node_of, num_chosen))
    assert largest <= most_nodes_of_token(groups, num_chosen, nodes) <= nodes
    if groups_fit_nodes(groups, nodes):
        assert most_nodes_of_token(groups, num_chosen, nodes) == largest


@given(st.integers(1, 12), st.integers(1, 24), st.integers(1, 4))
def test_nodes_that_expert_groups_fill(devices: int, expert: int, count: int) -> None:
    """A group is on one node or contains all ranks of its nodes, wherever it begins; None if some groups do not."""
    groups = [range(first, first + expert) for first in range(0, count * expert * devices, expert)]
    nodes_of_groups = [{rank // devices for rank in group} for group in groups]
    are_whole = all(len(nodes) == 1 or len(nodes) * devices == expert for nodes in nodes_of_groups)
    alike = group_nodes(devices, expert)
    assert (alike is not None) == are_whole and (alike is None or all(len(nodes) == alike for nodes in nodes_of_groups))

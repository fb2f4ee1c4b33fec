"""Expert groups over several nodes, with tokens sent by node: training equals plain autograd, memory is as proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from dsl.schema import Spec
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check
from tests.runtime.step.test_memory import measured_peaks


def on_nodes(chosen: Spec, nodes: int, route: str | None = None) -> Spec:
    """The spec on `nodes` nodes with the same total devices."""
    node = chosen.cluster.node
    cluster = chosen.cluster.model_copy(
        update={"nodes": nodes, "node": node.model_copy(update={"devices": node.devices // nodes})}
    )
    parallel = chosen.parallel.model_copy(update={"route": route})
    return chosen.model_copy(update={"cluster": cluster, "parallel": parallel})


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_training_by_nodes_equals_autograd(tmp_path: Path, segments: Segments, transport: str) -> None:
    """Groups of four ranks on two nodes of two, and on four of one; pipeline ranks with groups on two nodes of one."""
    specs = {
        "two": on_nodes(spec(1, 4, 4, 3, STEPS), 2),
        "four": on_nodes(spec(1, 4, 4, 3, STEPS, zero=1), 4),
        "pipeline": on_nodes(spec(2, 2, 2, 4, STEPS), 4),
        "softmax": on_nodes(spec(1, 4, 4, 3, STEPS, of="v2"), 2),
    }
    assert all(chosen.routes_by_nodes for chosen in specs.values())
    check(tmp_path, segments, specs, 4, transport)


@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp8_block"])
def test_forwarded_rows_are_counted(tmp_path: Path, segments: Segments, precision: str) -> None:
    measured_peaks(tmp_path, segments, on_nodes(spec(1, 4, 4, 2, precision=precision), 2))


def test_forwarded_rows_are_counted_in_a_pipeline(tmp_path: Path, segments: Segments) -> None:
    measured_peaks(tmp_path, segments, on_nodes(spec(2, 2, 2, 6), 4))

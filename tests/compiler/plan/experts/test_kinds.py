"""Experts of a layer fill nodes of the kind that runs the layer, on a cluster of several kinds of nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.ir import Use
from compiler.plan.expert_nodes import devices_of_nodes
from compiler.plan.plan import make_plan
from dsl.load import load
from runtime.contract.names import ParameterName

UI = Path(__file__).parents[3] / "ui"
RUN = """
import "{base}"
run mine extends base {{
  cluster = kinds
  parallel {{ pipeline = 2, expert = 8 }}
  schedule {{ name = {schedule} }}
  train {{ batch = 64 }}
}}
cluster kinds {{
  nodes = 1
  node {{ devices = 8, device large {{ cores = 1, memory = 4GB }} }}
  more {{ nodes = 2, node {{ devices = 4, device small {{ cores = 1, memory = 4GB }} }} }}
}}
"""


@pytest.fixture
def spec(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(schedule: str) -> Path:
        (tmp_path / "base.dsc").write_text((UI / "lib" / "base.dsc").read_text("utf-8"), "utf-8")
        (tmp_path / "mine.dsc").write_text(RUN.format(base="base.dsc", schedule=schedule), "utf-8")
        return tmp_path / "mine.dsc"

    return write


def test_experts_of_a_layer_fill_the_nodes_that_run_it(spec, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    """Expert ranks of the first stage fill one node of eight, those of the second stage two nodes of four."""
    chosen = load(spec("1f1b"))
    plan = make_plan(chosen)
    tensors = [
        {
            ParameterName(name).block
            for step in stage.steps
            if isinstance(step, Use)
            for _, name in step.params
            if ".ffn.exp" in name
        }
        for stage in plan.stages
    ]
    assert tensors[0] and tensors[1] and not tensors[0] & tensors[1]
    assert devices_of_nodes(chosen) == dict.fromkeys(tensors[0], 8) | dict.fromkeys(tensors[1], 4)
    folder = spec("1f1b").parent
    rows = [[3 * e + layer + 1 for e in range(16)] for layer in range(4)]
    (folder / "load.json").write_text(json.dumps({"load": rows}), "utf-8")
    assert main(["place", str(folder / "load.json"), str(folder / "mine.dsc"), "--format", "json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    one_node = {layer["layer"] for layer in layers if layer["links"]["after"]["between_nodes_bytes"] == 0}
    assert one_node == tensors[0]


def test_layers_on_two_kinds_of_nodes_use_the_smaller_nodes(spec) -> None:  # type: ignore[no-untyped-def]
    assert set(devices_of_nodes(load(spec("dualpipe"))).values()) == {4}

"""`dsc place` reads a load from a file or a run, and writes text, JSON, or a file that a spec can name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.cli.main import main
from compiler.plan.experts.layout import ExpertLayout, balance_of
from compiler.plan.experts.pack import greedy
from compiler.plan.experts.placement_file import physical_of, read_placement
from dsl.load import load as load_spec
from tests.compiler.cli.forms import parsed
from tests.compiler.plan.experts.loads import load_of

QUICKSTART = Path(__file__).parents[4] / "specs" / "quickstart.dsc"
Shown = pytest.CaptureFixture[str]


def load_file(folder: Path, *rows: Any) -> Path:
    path = folder / "load.json"
    path.write_text(json.dumps({"load": [np.asarray(row).tolist() for row in rows]}))
    return path


def placed(capsys: Shown, *words: object) -> Any:
    assert main(["place", *map(str, words), "--format", "json"]) == 0
    return parsed(capsys.readouterr().out, "placement")


def refused(capsys: Shown, *words: object) -> str:
    assert main(["place", *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def sizes(groups: int, nodes: int, devices: int) -> tuple[object, ...]:
    return "--groups", groups, "--nodes", nodes, "--devices", devices


@pytest.mark.parametrize(("groups", "nodes"), [(4, 2), (3, 2)])
def test_answer(tmp_path: Path, capsys: Shown, groups: int, nodes: int) -> None:
    rows = [load_of(kind, 24, 4) for kind in ("zipf", "uniform", "zeros")]
    document = placed(capsys, "--load", load_file(tmp_path, *rows), *sizes(groups, nodes, 8))
    layout = ExpertLayout(24, groups, nodes, 8)
    assert len(document["layers"]) == 3
    for row, layer in zip(rows, document["layers"], strict=True):
        physical = np.array(layer["physical_to_logical"])
        balance = balance_of(row, physical, layout)
        assert layer["balance"] == pytest.approx({"device": balance.device, "node": balance.node})
        assert sorted(physical.tolist()) == list(range(24))
        expected = balance_of(row, greedy(row, layout), layout)
        assert balance.device <= expected.device and layer["greedy"]["device"] == expected.device
        assert layer["gap"] == pytest.approx(layer["balance"]["device"] / layer["bound"] - 1)
        current = balance_of(row, np.arange(24), layout)
        assert layer["before"] == pytest.approx({"device": current.device, "node": current.node})


def test_json_to_a_program_is_one_document(tmp_path: Path, capsys: Shown) -> None:
    path = load_file(tmp_path, load_of("uniform", 8))
    assert placed(capsys, path, "--devices", 2) == placed(capsys, "--load", path, "--devices", 2)
    assert main(["place", str(path), "--devices", "3", "--format", "json"]) == 2
    printed = capsys.readouterr()
    assert parsed(printed.out, "failure")["error"] == "experts = 8 cannot be spread evenly over devices = 3"


def test_from_a_run_without_flags(tmp_path: Path, capsys: Shown) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "spec.resolved").write_text(
        subprocess.run(
            [sys.executable, "-m", "compiler.cli.main", "show", str(QUICKSTART)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    spec = load_spec(run / "spec.resolved")
    rows = [load_of("zipf", 16, seed) for seed in range(len(_layers(spec)))]
    load_file(run, *rows)
    document = placed(capsys, run, "-o", tmp_path / "placement.json")
    layers = read_placement(tmp_path / "placement.json")
    assert list(layers) == [layer["layer"] for layer in document["layers"]] == _layers(spec)
    for layer in document["layers"]:
        assert physical_of(layers[layer["layer"]]).tolist() == layer["physical_to_logical"]
        assert len(layers[layer["layer"]].moves) == len(layer["moves"]) > 0
        assert layer["balance"]["device"] < layer["before"]["device"]
        assert layer["links"]["copy_bytes"] == 2 * 4 * spec.model.hidden
    # the run resumes with it: this is then the current placement, and nothing moves
    (run / "placement.json").write_text((tmp_path / "placement.json").read_text())
    text = (run / "spec.resolved").read_text()
    (run / "spec.resolved").write_text(text.replace("zero = 0", 'placement = "placement.json"\n    zero = 0'))
    again = placed(capsys, run)
    assert all(layer["moves"] == [] for layer in again["layers"])
    assert [layer["before"] for layer in again["layers"]] == [layer["balance"] for layer in document["layers"]]


def _layers(spec: Any) -> list[str]:
    dense = spec.model.layers[0].last + 1
    return [*(f"layers.{index}" for index in range(dense, spec.model.num_layers)), "mtp.0"]


def test_text(tmp_path: Path, capsys: Shown) -> None:
    path = load_file(tmp_path, load_of("hot", 8), load_of("uniform", 8))
    assert main(["place", str(path), "--devices", "4", "--nodes", "2", "--groups", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for words in ("2 layers  8 experts in 2 groups on 4 devices in 2 nodes", "device now", "above bound", "best"):
        assert words in printed.out
    assert "→" in printed.out and "--group-rule auto" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 100


def test_text_without_groups_says_none(tmp_path: Path, capsys: Shown) -> None:
    assert main(["place", str(load_file(tmp_path, load_of("hot", 8))), "--devices", "4"]) == 0
    output = capsys.readouterr().out
    assert "1 layer  8 experts on 4 devices, 2 on each" in output and "group" not in output


def test_text_says_the_bytes_of_the_document(tmp_path: Path, capsys: Shown) -> None:
    degrees = ("cluster.nodes=2", "cluster.node.devices=2", "parallel.expert=4", "parallel.pipeline=1")
    changes = [word for override in (*degrees, "schedule.name=1f1b") for word in ("-s", override)]
    loads = load_file(tmp_path, *(load_of("zipf", 16, seed) for seed in range(4)))
    links = [layer["links"] for layer in placed(capsys, QUICKSTART, "--load", loads, *changes)["layers"]]
    assert main(["place", str(QUICKSTART), "--load", str(loads), *changes]) == 0
    lines = capsys.readouterr().out.splitlines()
    for label, key in (
        ("between nodes", "between_nodes_bytes"),
        ("busiest node", "busiest_node_bytes"),
        ("to devices", "to_devices_bytes"),
        ("busiest device", "busiest_device_bytes"),
    ):
        (line,) = (line for line in lines if line.startswith(f"{label}  "))
        amounts = [
            float(number) * {"B": 1, "KB": 1000}[unit] for number, unit in re.findall(r"([\d.]+) (K?B)", line)[:2]
        ]
        means = [sum(layer[time][key] for layer in links) / len(links) for time in ("before", "after")]
        assert " → " in line and amounts == pytest.approx(means, rel=0.04)


def test_one_token_gives_the_worst_balance(tmp_path: Path, capsys: Shown) -> None:
    (layer,) = placed(capsys, load_file(tmp_path, [1, 0, 0, 0]), "--devices", 4, "--nodes", 2)["layers"]
    assert layer["balance"] == {"device": 4.0, "node": 2.0}


def test_a_load_without_tokens_is_reported(tmp_path: Path, capsys: Shown) -> None:
    assert main(["place", str(load_file(tmp_path, [0] * 4)), "--devices", "2", "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert "warning: the load counts no tokens" in printed.err
    assert json.loads(printed.out)["layers"][0]["balance"] == {"device": 1.0, "node": 1.0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (sizes(1, 1, 3), "experts = 8 cannot be spread evenly over devices = 3"),
        (sizes(1, 3, 4), "devices = 4 cannot be spread evenly over nodes = 3"),
        (sizes(3, 1, 2), "the 8 experts of the load file do not divide into groups = 3"),
        (sizes(0, 1, 2), "--groups 0: must be at least 1"),
        (("--groups", 8), "--devices is missing"),
        (("--devices", 2, "--nodes", 2, "--groups", 1, "--group-rule", "keep"), "--group-rule ignore"),
        (("--devices", 2, "-s", "a=1"), "-s overrides keys of a spec, and no spec is named"),
        (("--devices", 2, "-o", "/dev/null/x"), "/dev/null/x cannot be written: Not a directory"),
        (("--devices", 2, "-o", "/dev"), "/dev cannot be written: it is a folder"),
        ((QUICKSTART,), "but the model of"),
    ],
)
def test_wrong_command_lines(tmp_path: Path, capsys: Shown, flags: tuple[object, ...], message: str) -> None:
    assert message in refused(capsys, load_file(tmp_path, [1] * 8), *flags)


def test_wrong_loads(tmp_path: Path, capsys: Shown) -> None:
    path = load_file(tmp_path, [1] * 8, [1] * 7)
    assert "row 1 has 7 experts, but row 0 has 8" in refused(capsys, path, "--devices", 2)
    assert "there is no file" in refused(capsys, tmp_path / "none.json", "--devices", 2)
    assert "has not saved a checkpoint" in refused(capsys, tmp_path.parent / tmp_path.name / "..", "--devices", 2)
    assert "which load?" in refused(capsys)
    assert "leave one of them out" in refused(capsys, path, QUICKSTART, "--load", path)
    assert "there is no file" in refused(capsys, path, tmp_path / "none.dsc")
    large = load_file(tmp_path, *([[1] * 4096] * 1100))
    assert "experts in all layers are too many" in refused(capsys, large, "--devices", 2)


def test_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from compiler.cli.main import main; code = main(sys.argv[1:]);"
        "sys.exit(code or bool({'torch', 'networkx', 'pydantic'} & set(sys.modules)))"
    )
    words = ["place", str(load_file(tmp_path, [1, 2, 3, 4])), "--devices", "2", "--format", "json"]
    assert subprocess.run([sys.executable, "-c", code, *words], check=False, capture_output=True).returncode == 0

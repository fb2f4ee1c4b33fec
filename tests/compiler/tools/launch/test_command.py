"""`dsc launch` as a command: messages, refusals, and files that it must not touch."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.cli.reference import commands_page
from compiler.tools.launch.options import label_of, seconds_of
from tests.compiler.cli.forms import parsed
from tests.compiler.tools.launch.cluster import NEEDED, launch
from tests.compiler.tools.launch.conftest import NODE, TINY, compiled

Captured = pytest.CaptureFixture[str]
KUBERNETES = ["kubernetes", *NEEDED["kubernetes"]]


@pytest.mark.parametrize("launcher", NEEDED)
def test_json_lists_the_written_files(launcher: str, two_nodes: Path, tmp_path: Path, capsys: Captured) -> None:
    launch(launcher, two_nodes, tmp_path / "out", "--format", "json")
    document = parsed(capsys.readouterr().out, "launch")
    assert (document["run"], document["nodes"], document["ranks_per_node"]) == ("tiny", 2, 1)
    listed = {Path(file["path"]): file["bytes"] for file in document["files"]}
    assert listed == {path: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert all(str(tmp_path / "out") in command for command in document["commands"])


def test_scripts_can_be_started_and_are_replaced(two_nodes: Path, tmp_path: Path) -> None:
    for _ in range(2):
        launch("slurm", two_nodes, tmp_path)
    for name in ("node.sh", "job.sbatch"):
        assert (tmp_path / name).stat().st_mode & stat.S_IXUSR
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sbatch", "node.sh"]


def test_writing_twice_gives_equal_files(two_nodes: Path, tmp_path: Path) -> None:
    for launcher in NEEDED:
        first = {path.name: path.read_bytes() for path in launch(launcher, two_nodes, tmp_path).folder.iterdir()}
        assert {
            path.name: path.read_bytes() for path in launch(launcher, two_nodes, tmp_path).folder.iterdir()
        } == first


def test_nothing_is_left_to_fill_in(two_nodes: Path, tmp_path: Path) -> None:
    for launcher in NEEDED:
        for path in launch(launcher, two_nodes, tmp_path / launcher).folder.iterdir():
            assert not re.search("TODO|FIXME|CHANGE|<[a-z_-]+>|YOUR", path.read_text("utf-8")), path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm"], "slurm needs --time: the time limit of the job"),
        (["kubernetes"], "kubernetes needs --image: a container image that has dsc"),
        (["kubernetes", "--image", "a"], "kubernetes needs --volume: a PersistentVolumeClaim"),
        (["skypilot", "--image", "a"], "skypilot needs --volume: a volume of SkyPilot"),
        (["torchrun", "--time", "1:00"], "--time is an option of slurm, not of torchrun"),
        (
            ["slurm", "--time", "1:00", "--volume", "a"],
            "--volume is an option of kubernetes and skypilot, not of slurm",
        ),
        (["torchrun", "--image", "a"], "--image is an option of slurm and kubernetes and skypilot, not of torchrun"),
        (["slurm", "--time", "60", "--mount", "/a"], "--mount needs a container"),
        (
            ["slurm", "--time", "60", "--gres", "gpu:3"],
            "--gres gpu:3 has 3 devices, but the build needs 0 on each node",
        ),
        (["slurm", "--time", "60", "--gres", "gpu:1\n#SBATCH --wrap=x"], "--gres 'gpu:1\\n#SBATCH --wrap=x' has char"),
        (["slurm", "--time", "60", "--image", "a.sif", "--data", "here"], "the folder 'here'"),
        (["slurm", "--time", "60", "--image", "a", "--data", "/a:b"], "the folder '/a:b'"),
        ([*KUBERNETES, "--field", "containers=[]"], "--field containers is not a field of a pod that can be set"),
        (["kubernetes", "--image", "/a.sif", "--volume", "b"], "--image /a.sif is not an image in a registry"),
        (["skypilot", *KUBERNETES[1:], "--field", "infra=k8s"], "--field infra is not a field of resources of Sky"),
        (["slurm", "--time", "4:00"], "--lead 300 is not below --time 4:00"),
        (["slurm", "--time", "60", "--partition", "a b"], "--partition 'a b' has characters"),
        (["slurm", "--time", "60", "--account", "x\n#SBATCH --wrap"], "--account 'x\\n#SBATCH --wrap' has characters"),
        (["slurm", "--time", "60", "--qos", "a#b"], "--qos 'a#b' has characters"),
    ],
)
def test_missing_options_and_those_of_other_launchers_are_named(
    words: list[str], said: str, two_nodes: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert main(["launch", words[0], str(two_nodes), "--out", str(tmp_path / "out"), *words[1:]]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--time", ["0", "soon", "1:2:3:4", "-1", "1\n"]),
        ("--image", ["a b", "$(x)", "a\nb", ""]),
        ("--volume", ["A", "a/b", "a\n", ""]),
        ("--mount", ["here", "/", "/a/../b", "/a b"]),
        ("--interface", ["", "eth0;x", "a b", "$(x)"]),
        ("--name", ["Upper", "9", "a_b", "x" * 41, "a\n"]),
        ("--env", ["A", "1A=2", "A B=1", "=x"]),
        ("--resource", ["rdma/ib", "rdma/ib=0", "a b=1"]),
        ("--port", ["80", "65536", "x"]),
        (
            "--sbatch",
            ["-p gpu", "wrap=x", "node=3", "time=1", "a=b c", "a=$(x)", "a=b\n#SBATCH --wrap=x", "a='b'", "A=b"],
        ),
        ("--field", ["nodeSelector", "a={", "a=b c", "a=[Infinity]", "a\n=1", "=1"]),
    ],
)
def test_values_of_no_use_are_refused(option: str, values: list[str], two_nodes: Path, capsys: Captured) -> None:
    for value in values:
        with pytest.raises(SystemExit) as ended:
            main(["launch", "slurm", str(two_nodes), option, value])
        assert ended.value.code == 2 and f"argument {option}" in capsys.readouterr().err


def test_options_of_each_launcher_are_in_the_reference() -> None:
    """Options in groups count as options of the command."""
    page = commands_page()
    for option in ("--sbatch NAME=VALUE", "--volume VOLUME", "--elastic MIN", "--format text"):
        assert f"| `{option}" in page


def test_a_folder_that_is_not_a_build(tmp_path: Path, capsys: Captured) -> None:
    assert main(["launch", "torchrun", str(tmp_path)]) == 2
    assert "holds no build" in capsys.readouterr().err


def test_nothing_is_written_into_a_build(two_nodes: Path, capsys: Captured) -> None:
    assert main(["launch", "torchrun", str(two_nodes), "--out", str(two_nodes / "launch")]) == 2
    assert "is inside the build" in capsys.readouterr().err and not (two_nodes / "launch").exists()


def test_a_link_is_not_followed(two_nodes: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out" / "node.sh").symlink_to(tmp_path / "mine")
    assert main(["launch", "torchrun", str(two_nodes), "--out", str(tmp_path / "out")]) == 2
    assert "it is not a regular file" in capsys.readouterr().err and (tmp_path / "mine").read_text() == "mine"


def test_nodes_of_different_counts_are_refused(tmp_path: Path, capsys: Captured) -> None:
    node_block = NODE.replace("devices = 1", "devices = 2")
    text = TINY.replace(NODE, f"{NODE}, more {{ nodes = 1, {node_block} }}").replace("layers 1..1", "layers 1..2")
    build = compiled(tmp_path, text.replace("pipeline = 1", "pipeline = 3"))
    assert main(["launch", "torchrun", str(build)]) == 2
    assert "the nodes of cluster one have different numbers of devices (1 of 1, 1 of 2)" in capsys.readouterr().err


def test_a_device_unknown_to_skypilot_needs_a_name(gpu_nodes: Path, tmp_path: Path, capsys: Captured) -> None:
    text = (gpu_nodes.parent / "spec.dsc").read_text("utf-8").replace("device h100", "device h800")
    build = compiled(tmp_path, text)
    words = ["launch", "skypilot", str(build), "--out", str(tmp_path / "out"), *NEEDED["skypilot"]]
    assert main(words) == 2
    assert "dsc knows no SkyPilot name for the spec's device h800" in capsys.readouterr().err
    assert main([*words, "--accelerator", "H800"]) == 0


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("1:30", 90), ("1:02:03", 3723), ("2-3", 183600), ("1-00:30", 88200), ("1-1:1:1", 90061)],
)
def test_times_of_sbatch(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


@pytest.mark.parametrize(
    ("run", "label"),
    [("quickstart", "quickstart"), ("V3_base.2", "v3-base-2"), ("_", "run"), ("_9", "run-9"), ("x" * 99, "x" * 40)],
)
def test_names_of_jobs(run: str, label: str) -> None:
    assert label_of(run) == label

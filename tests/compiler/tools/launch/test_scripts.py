"""The scripts of `dsc launch`: names in paths and options are quoted, and missing variables are named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.tools.launch.files import quote, script
from tests.compiler.tools.launch.cluster import NEEDED, SAID, Written, fake_python, launch, told

SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
HOSTILE = (
    "it's",
    'a "quoted" name',
    "two\nlines",
    "$(touch canary)",
    "`touch canary`",
    "a; touch canary #",
    "' && touch canary '",
    "$HOME ${PATH} \\ *",
    "-rf",
    "{{ canary }} {% raw %}",
    "ß→漢字 🙂",
    "\N{RIGHT-TO-LEFT OVERRIDE}abc",
    "\r\t\x1b[31m",
    "EOF\nnode.sh: |\n  touch canary",
)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("launcher", NEEDED)
def test_hostile_names_stay_text(launcher: str, name: str, two_nodes: Path, tmp_path: Path) -> None:
    """The started program receives every value unchanged, and nothing else runs."""
    build = tmp_path / name / "build"
    shutil.copytree(two_nodes, build)
    python = fake_python(tmp_path / name / "python")
    words = ["--run-folder", f"runs/{name}", "--data", f"/data/{name}", "--build-path", str(build)]
    words += ["--python", str(python), "--env", f"GREETING={name}", "--env", f"TOLD={tmp_path / 'told'}"]
    written = launch(launcher, two_nodes, tmp_path / name / "out", *words)
    done = written.start()
    assert (done.returncode, done.stderr) == (0, "")
    received = told(tmp_path / "told")
    assert received["environment"]["GREETING"] == name
    started = received["words"]
    assert started[:3] == ["-P", "-m", "torch.distributed.run"]
    assert started[started.index(f"{build}/train.py") + 1 :][:4] == ["--out", f"runs/{name}", "--data", f"/data/{name}"]
    assert not list(tmp_path.rglob("canary"))


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
@settings(max_examples=100)
def test_a_quoted_word_is_one_word(text: str) -> None:
    """Bash reads it as one word."""
    printed = subprocess.run(
        ["bash", "-c", f"printf %s {quote(text)}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert printed.stdout.decode() == text


def test_a_text_that_is_not_quoted_is_refused() -> None:
    values = {"job_name": "$(touch canary)", "nodes": 1, "gpus": 0, "time": quote("1"), "lead": 1, "options": ()}
    with pytest.raises(AssertionError, match="is not quoted"):
        script("job.sbatch.j2", **values, node_script="", run="", restarts=0)


@pytest.mark.parametrize("launcher", NEEDED)
@pytest.mark.parametrize("nodes", ["one_node", "two_nodes", "gpu_nodes", "elastic"])
def test_scripts_pass_bash_and_shellcheck(
    launcher: str, nodes: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    options = ("--elastic", "1") if nodes == "elastic" and launcher in ("torchrun", "slurm") else ()
    nodes = "two_nodes" if nodes == "elastic" else nodes
    assert SHELLCHECK, "shellcheck is a part of the packages for tests: pip install -e '.[dev]'"
    written = launch(
        launcher, request.getfixturevalue(nodes), tmp_path / "out", "--env", "A=it's", "--interface", "eth0", *options
    )
    scripts = {"node.sh": written.script()}
    if launcher == "slurm":
        scripts["job.sbatch"] = (written.folder / "job.sbatch").read_text("utf-8")
    for name, text in scripts.items():
        path = tmp_path / name
        path.write_text(text, "utf-8")
        for command in (["bash", "-n"], [SHELLCHECK, "--shell=bash", "--norc"]):
            done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---------------------------------------------------------------- requirements of a script


@pytest.fixture
def written(two_nodes: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Written:
    python = fake_python(tmp_path / "python")
    words = ("--python", str(python), "--build-path", str(two_nodes), "--env", f"TOLD={tmp_path / 'told'}")
    return launch(request.param, two_nodes, tmp_path / "out", *words)


@pytest.mark.parametrize("written", NEEDED, indirect=True)
def test_every_node_connects_to_the_first(written: Written, tmp_path: Path) -> None:
    hosts = {"kubernetes": "tiny-node-0-0.tiny"}
    for node in ("0", "1"):
        variables = {name: node if value == "1" else value for name, value in SAID[written.launcher].items()}
        assert written.start(variables, ("first", node)).returncode == 0
        words = told(tmp_path / "told")["words"]
        assert words[words.index("--nnodes") + 1] == "2" and words[words.index("--nproc-per-node") + 1] == "1"
        assert words[words.index("--rdzv-backend") + 1] == "c10d"
        assert words[words.index("--rdzv-endpoint") + 1] == f"{hosts.get(written.launcher, 'first')}:29400"
        assert words[words.index("--rdzv-conf") + 1] == f"is_host={'true' if node == '0' else 'false'}"
        assert "--resume" in words and "--standalone" not in words


@pytest.mark.parametrize("written", ["slurm", "kubernetes", "skypilot"], indirect=True)
def test_variables_missing_from_the_scheduler_are_named(written: Written) -> None:
    """There is no default: a script started without the variable ends at once."""
    for name in SAID[written.launcher]:
        variables = {variable: value for variable, value in SAID[written.launcher].items() if variable != name}
        done = written.start(variables)
        assert done.returncode != 0 and name in done.stderr


@pytest.mark.parametrize("written", ["torchrun"], indirect=True)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1", ""])
def test_loopback_hosts_are_refused(written: Written, host: str) -> None:
    done = written.start(words=(host, "0"))
    assert done.returncode == 2
    assert done.stderr == f"error: '{host}' is not a name of the first node: use one under which other nodes reach it\n"


@pytest.mark.parametrize("written", ["torchrun"], indirect=True)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "usage: node.sh HOST NODE, where HOST is the first node, and NODE is the number of this one, from 0"),
        (
            ("first",),
            "usage: node.sh HOST NODE, where HOST is the first node, and NODE is the number of this one, from 0",
        ),
        (("first", "2"), "the build is for 2 nodes, so there is no node 2: the last is 1"),
        (("first", "second"), "the number of a node is from 0 to 1, not 'second'"),
        (("first", ""), "the number of a node is from 0 to 1, not ''"),
    ],
)
def test_wrong_words_are_refused(written: Written, words: tuple[str, ...], said: str) -> None:
    done = written.start(words=words)
    assert (done.returncode, done.stderr) == (2, f"error: {said}\n")


def test_missing_python_or_build_on_a_node_is_reported(two_nodes: Path, tmp_path: Path) -> None:
    done = launch("torchrun", two_nodes, tmp_path / "a", "--python", "/nowhere/python").start()
    assert (done.returncode, done.stderr) == (
        2, "error: there is no /nowhere/python on this node: name another with --python\n"
    )  # fmt: skip
    done = launch("torchrun", two_nodes, tmp_path / "b", "--build-path", "/nowhere").start()
    assert done.stderr == "error: /nowhere holds no build on this node: name the folder with --build-path\n"


def test_one_node_needs_no_host(one_node: Path, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python")
    words = ("--python", str(python), "--env", f"TOLD={tmp_path / 'told'}")
    written = launch("torchrun", one_node, tmp_path / "out", *words)
    assert written.start(words=()).returncode == 0
    assert "--standalone" in told(tmp_path / "told")["words"]


def test_the_start_command_has_a_host_only_for_several_nodes(
    one_node: Path, two_nodes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operands = " HOST NODE  # on every node: HOST is the first node, NODE is 0 on it, up to 1 on the others"
    for build, words in ((one_node, ""), (two_nodes, operands)):
        launch("torchrun", build, tmp_path)
        assert capsys.readouterr().out.endswith(f"start:\n  {tmp_path / 'node.sh'}{words}\n")


def test_the_network_of_the_options(gpu_nodes: Path, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python")
    words = ("--interface", "=ib0", "--hca", "mlx5_0,mlx5_1", "--python", str(python))
    written = launch("slurm", gpu_nodes, tmp_path / "out", *words, "--env", f"TOLD={tmp_path / 'told'}")
    assert written.start().returncode == 0
    received = told(tmp_path / "told")
    names = {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "mlx5_0,mlx5_1"}
    assert {name: received["environment"].get(name) for name in names} == names
    assert received["words"][received["words"].index("--device") + 1] == "cuda"

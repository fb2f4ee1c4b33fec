"""Builds that the tests of launching share."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load

ROOT = Path(__file__).parents[4]
TINY = (ROOT / "specs" / "tiny.dsc").read_text("utf-8")
NODE = "node { devices = 1, device cpu { cores = 1, memory = 4GB } }"
GPU_NODE = "node { devices = 1, device h100 { memory = 79GiB }, nvlink = 450GB/s, nic = 50GB/s }"


def compiled(folder: Path, text: str, run: str | None = None) -> Path:
    """The build of a spec, or of one phase of it."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "spec.dsc"
    spec.write_text(text, "utf-8")
    build = folder / (run or "build")
    write_build(build, compile_spec(load(spec, run)).files)
    return build


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build of a run on two nodes of one device each, a CPU."""
    assert NODE in TINY
    return compiled(tmp_path_factory.mktemp("two"), TINY.replace("nodes = 1", "nodes = 2"))


@pytest.fixture(scope="session")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build of a run on one node."""
    return compiled(tmp_path_factory.mktemp("one"), TINY)


@pytest.fixture(scope="session")
def gpu_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build of a run on two nodes of one GPU each."""
    text = TINY.replace("nodes = 1", "nodes = 2").replace(NODE, GPU_NODE)
    return compiled(tmp_path_factory.mktemp("gpu"), text)

"""Checkpoints that are copied to a networked store, S3 by moto's server: the network is cut during a copy."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime.processes import wait_for
from tests.runtime.run.cable import Cable, cable
from tests.runtime.run.place import Place, bits, rows, saved, untimed
from tests.runtime.run.test_places import CHECKPOINT, TWO_RANKS, events

STORES = Path(__file__).parents[3] / ".stores"  # s3fs and moto, installed by `make soak`
BUCKET = "s3://bucket/mine"


@pytest.fixture
def to_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cable]:
    """A store with a bucket, and the cable through which the processes of a test reach it."""
    assert (STORES / "moto").exists() and (STORES / "s3fs").exists(), "make .stores/.installed"
    monkeypatch.setenv("PYTHONPATH", str(STORES))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (sys.executable, "-P", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    with (tmp_path / "store.out").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_for(lambda: _has_bucket(port), "the store")
            with cable(port) as link:
                account = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
                for name, value in (account | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}"}).items():
                    monkeypatch.setenv(name, value)
                yield link
        finally:
            server.kill()


def _has_bucket(port: int) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def test_a_network_that_is_cut_in_a_copy(new_place: Callable[[], Place], to_store: Cable) -> None:
    """Training continues and reports what was not copied, a later checkpoint is copied, and a run whose folder is lost
    is resumed from the store, bit-identical to a run without a store."""
    place = new_place()
    spec = place.write(TWO_RANKS | {"steps": 10**6})
    text = spec.read_text("utf-8")
    spec.write_text(text.replace(CHECKPOINT, CHECKPOINT.replace(" }", f', to = [local, "{BUCKET}"] }}')), "utf-8")
    place.dsc("compile", "tiny.dsc")
    run = place.folder / "run"
    with place.started("train", "tiny.dsc", "--out", run, anew=True) as running:
        running.wait_for_step(run, 3)
        wait_for(lambda: events(run, "copy"), "the first copy")
        to_store.cut_after(10_000)
        wait_for(lambda: events(run, "copy_failed"), "a copy that fails")
        failed = events(run, "copy_failed")[0]
        assert to_store.num_cuts == 1 and failed["place"] == BUCKET and failed["reason"]
        before = len(rows(run))
        wait_for(lambda: len(rows(run)) > before + 6, "steps without the store")
        to_store.mend()
        wait_for(lambda: events(run, "copy")[-1]["step"] > failed["step"], "another copy")
        os.kill(running.process.pid, signal.SIGTERM)
        assert running.ends() == 128 + signal.SIGTERM
        output = running.stdout() + running.stderr()
    assert f"step {failed['step']} was not copied to {BUCKET}, the next checkpoint will be: {BUCKET}: " in output
    last = saved(run).step
    assert events(run, "copy")[-1]["step"] == last, "the last checkpoint is waited for"
    shutil.rmtree(run)
    done = place.dsc("train", "tiny.dsc", "--out", run, "--resume", "--steps", last + 3, anew=True)
    assert f"step-{last:08d} is taken from {BUCKET}\n" in done.stdout
    place.dsc("train", "tiny.dsc", "--out", "straight", "--no-copies", "--steps", last + 3)
    assert bits(saved(run)) == bits(saved(place.folder / "straight"))
    assert untimed(run)[-1] == untimed(place.folder / "straight")[-1]

"""The CSV that an export to torchtitan writes, run by torch's own pipeline runtime in real processes over gloo: the
gradients equal plain autograd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compiler.cli.main import main
from compiler.ir.stage_placement import V
from compiler.schedule.spec_schedule import read_schedule
from tests import copies
from tests.compiler.tools.exchange.pipeline_worker import batch, layers, loss_of
from tests.runtime.processes import wait_for

ROOT = Path(__file__).parents[4]
TWO = """
import "tiny.dsc"
run two extends tiny {{
  model = wide, cluster = pair
  parallel {{ pipeline = 2 }}
  schedule {{ name = {name} }}
  train {{ batch = {batch} }}
}}
model wide extends tiny {{
  layers 0..0 {{ ffn dense {{ inner = 32 }} }}
  layers 1..3 {{ ffn moe {{ experts = 4, shared = 1, top_k = 2, inner = 16, score = sigmoid, normalize = true }} }}
  mtp = none
}}
cluster pair {{ nodes = 1, node {{ devices = 2, device cpu {{ cores = 1, memory = 4GB }} }} }}
"""


@pytest.mark.parametrize("name", ["1f1b", "interleaved_zb", "dualpipev"])
def test_gradients_equal_autograd(name: str, tmp_path: Path) -> None:
    spec = tmp_path / "two.dsc"
    copies.copy(ROOT / "specs" / "tiny.dsc", tmp_path)
    spec.write_text(TWO.format(name=name, batch=6))
    assert main(["export", "torchtitan", str(spec), "-o", str(tmp_path / "out"), "--lossy"]) == 0
    csv = tmp_path / "out" / "schedule.csv"
    schedule = read_schedule(csv)
    assert (schedule.num_ranks, schedule.num_micro_batches) == (2, 6)
    kind = "V" if schedule.stage_placement == V else "LOOP"
    sizes = [2, schedule.num_stages, schedule.num_micro_batches]
    command = [sys.executable, "-m", "tests.compiler.tools.exchange.pipeline_worker", str(csv), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *map(str, sizes), kind, str(tmp_path / f"{rank}.safetensors")],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stderr=(tmp_path / f"errors {rank}").open("w"),
        )
        for rank in range(2)
    ]
    try:
        wait_for(lambda: all(rank.poll() is not None for rank in ranks), "the end of both ranks")
        for number, rank in enumerate(ranks):
            assert rank.returncode == 0, (tmp_path / f"errors {number}").read_text()
    finally:
        for rank in ranks:
            rank.kill()
    gradients = {k: v for rank in range(2) for k, v in load_file(tmp_path / f"{rank}.safetensors").items()}
    model = layers(schedule.num_stages)
    x, target = batch(schedule.num_micro_batches)
    loss_of(torch.nn.Sequential(*model)(x), target).backward()
    expected = {f"{s}.{n}": p.grad for s, stage in enumerate(model) for n, p in stage.named_parameters()}
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient is not None
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-12, atol=1e-12)

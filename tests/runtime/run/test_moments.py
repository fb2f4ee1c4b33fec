"""The tiny spec with BF16 moments: trained, interrupted, resumed, and the contents of its checkpoints and plan."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from tests import copies
from tests.runtime.run.place import CORPUS, Place, bits, saved, untimed
from tests.specs.shipped import SPECS

SPEC = """
import "tiny.dsc"
precision short extends {base} {{ moments = bf16 }}
run mine extends tiny {{
  precision = short
  train {{ checkpoint {{ every = 2 steps, keep = 10 }} }}
  data  {{ source = "corpus/*.py", tokenizer = train(300) }}
}}
"""


@pytest.fixture(params=["fp32", "bf16"])
def mine(place: Place, request: pytest.FixtureRequest) -> Place:
    """A folder with this spec and its files."""
    (place.folder / "corpus").mkdir()
    for name in CORPUS:
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py", place.folder / "corpus")
    copies.copy(SPECS / "tiny.dsc", place.folder)
    (place.folder / "mine.dsc").write_text(SPEC.format(base=request.param), "utf-8")
    return place


def test_a_resumed_run_is_equal_to_the_bit(mine: Place) -> None:
    for words in (("straight",), ("broken", "--steps", 2), ("broken", "--resume")):
        done = mine.dsc("train", "mine.dsc:mine", "--out", *words)
        assert "not bit for bit" not in done.stdout + done.stderr
    straight, broken = (mine.folder / run for run in ("straight", "broken"))
    assert [row["step"] for row in untimed(straight)] == [1, 2, 3, 4, 5]
    assert untimed(broken) == untimed(straight)
    early, late = bits(saved(broken, 2)), bits(saved(broken))
    assert late == bits(saved(straight))
    assert not [name for name in late if early[name] == late[name] and not name.startswith("bias/")]

    dtypes = {name: tensor.dtype for name, tensor in saved(straight).read(late).items()}
    of_kind = {kind: {d for name, d in dtypes.items() if name.startswith(f"{kind}/")} for kind in ("weight", "bias")}
    assert of_kind == {"weight": {torch.float32}, "bias": {torch.float32}}
    moments = {name: dtype for name, dtype in dtypes.items() if name.startswith("moment")}
    assert set(moments.values()) == {torch.bfloat16}
    assert len(moments) == 2 * sum(name.startswith("weight/") for name in dtypes)

    done = mine.dsc(
        "train", "mine.dsc:mine", "-s", "precision.moments=fp32", "--out", "broken", "--resume", "--steps", 6
    )
    assert (
        "not bit for bit as without the break, because this differs: precision.moments bfloat16 → float32"
        in done.stdout
    )
    longer = saved(broken)
    assert {tensor.dtype for tensor in longer.read(longer.shapes).values()} == {torch.float32}


def test_the_plan_counts_two_bytes_each(mine: Place) -> None:
    """Four bytes less per parameter than with FP32 moments; one device updates all parameters."""

    def optimizer_bytes(*words: str) -> int:
        plan = json.loads(mine.dsc("plan", "mine.dsc:mine", "--format", "json", *words).stdout)
        (rank,) = plan["memory"]["ranks"]
        return int(rank["optimizer"])

    short, wide = optimizer_bytes(), optimizer_bytes("-s", "precision.moments=fp32")
    mine.dsc("train", "mine.dsc:mine", "--out", "run", "--steps", 1)
    checkpoint = saved(mine.folder / "run")
    moments = checkpoint.read([name for name in checkpoint.shapes if name.startswith("moment")])
    assert wide - short == sum(tensor.nbytes for tensor in moments.values())

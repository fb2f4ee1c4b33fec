"""An interrupted and resumed low-precision run: quantised weights are recomputed and never saved.

Random numbers for stochastic rounding depend on the step: a resumed run draws the same ones.
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.run.place import FOUR_RANKS, Place, bits, saved, untimed

FEW_BITS = """
model tiny {{
  vocab = 300, hidden = 32, init_std = 0.02, norm_eps = 1e-6
  attention mla {{
    heads = 2, query_rank = 16, kv_rank = 16
    head_dim {{ nope = 8, rope = 4, value = 8 }}
    rope {{ theta = 10_000 }}
  }}
  layers 0..0 {{ ffn dense {{ inner = 32 }} }}
  layers 1..1 {{
    ffn moe {{
      experts = 4, shared = 1, top_k = {top_k}, inner = 16
      groups = 2, top_groups = 1
      score = sigmoid, normalize = true, scale = 2.5
      balance {{ bias_rate = 0.001, sequence_loss = 1e-4 }}
    }}
  }}
  mtp {{ depth = 1, weight = 0.3 }}
}}
precision low extends nvfp4 {{ high = none }}
"""


@pytest.mark.parametrize(("precision", "zero"), [("low", 1), ("fp8_block", 0), ("fp8_block", 1), ("mxfp8", 0)])
def test_resuming_is_bit_exact(place: Place, precision: str, zero: int) -> None:
    place.compile(dict(FOUR_RANKS, zero=zero, model=FEW_BITS, precision=precision, steps=4))
    for words in (("straight",), ("broken", "--steps", 3), ("broken", "--resume")):
        done = place.dsc("train", "--out", *words)
        assert "not bit for bit" not in done.stdout + done.stderr
    straight, broken = (place.folder / run for run in ("straight", "broken"))
    assert [row["step"] for row in untimed(straight)] == [1, 2, 3, 4]
    assert untimed(broken) == untimed(straight)
    assert bits(saved(broken)) == bits(saved(straight))
    losses = [row["loss"] for row in untimed(straight)]
    assert losses[-1] < losses[0], "it learns"
    dtypes = {(name.partition("/")[0], t.dtype) for name, t in saved(broken).read(saved(broken).shapes).items()}
    wide, narrow = torch.float32, torch.bfloat16 if precision == "fp8_block" else torch.float32
    assert dtypes == {("weight", wide), ("bias", wide), ("moment1", narrow), ("moment2", narrow)}

"""Mistakes are inserted into a right spec; each is reported once, at its line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsl.load import analyse
from dsl.messages.diagnostics import Source

BASE = (Path(__file__).parents[1] / "ui" / "lib" / "base.dsc").read_text("utf-8")
# One line for each value, so that each mistake is on a separate line.
RIGHT = """\
run base {
  model     = base
  cluster   = four
  precision = fp32
  parallel {
    pipeline = 2
    expert   = 2
    zero     = 1
  }
  schedule {
    name = dualpipe
  }
  sm {
    communication = 0
  }
  recompute = [rmsnorm, swiglu]
  train {
    sequence    = 128
    micro_batch = 2
    batch       = 16
    steps       = 100
    optimizer adamw {
      beta1        = 0.9
      weight_decay = 0.1
      clip         = 1.0
    }
    rate {
      warmup 20 steps to 2e-3
      constant 20 steps
      cosine to 2e-4
    }
    seed = 3
    checkpoint {
      every = 50 steps
      keep  = 3
    }
    validate {
      every = 10 steps
    }
  }
  data {
    source     = python_stdlib
    tokenizer  = train(4096)
    validation = 5%
  }
}

let width = 64

model base {
  vocab    = 4096
  hidden   = width * 3
  init_std = 0.02
  norm_eps = 1e-6
  attention mla {
    heads      = 4
    query_rank = 96
    kv_rank    = 64
    head_dim {
      nope  = 32
      rope  = 16
      value = 32
    }
    rope {
      theta = 10_000
    }
  }
  layers 0..0 {
    ffn dense {
      inner = 512
    }
  }
  layers 1..3 {
    ffn moe {
      experts    = 16
      shared     = 1
      top_k      = 4
      inner      = 128
      groups     = 4
      top_groups = 2
      score      = sigmoid
      normalize  = true
      scale      = 2.5
      balance {
        bias_rate     = 0.001 until 50 steps then 0
        sequence_loss = 1e-4
      }
    }
  }
  mtp {
    depth  = 1
    weight = 0.3 until 10 steps then 0.1
  }
}

cluster four {
  nodes = 1
  node {
    devices = 4
    device cpu {
      cores  = 2
      memory = 4GB
      price  = 2USD/h
    }
  }
}
"""
# (a line of RIGHT, its wrong replacement, the code of the error)
MISTAKES = (
    ("    pipeline = 2", "    pipelin = 2", "E0201"),
    ("    expert   = 2", "    expert   = 2.5", "E0302"),
    ("    zero     = 1", "    zero     = 7", "E0303"),
    ("    name = dualpipe", "    name = dualpip", "E0304"),
    ("    communication = 0", "    communication 0", "E0204"),
    ("  recompute = [rmsnorm, swiglu]", "  recompute = [rmsnorm,, swiglu]", "E0108"),
    ("  precision = fp32", "  precision = fp23", "E0401"),
    ("    sequence    = 128", "    sequence    = 128GB", "E0301"),
    ("    batch       = 16", "    batch       = 16 16", "E0302"),
    ("    steps       = 100", "    steps       = 100x", "E0301"),
    ("      beta1        = 0.9", "      beta1        = 1.9", "E0303"),
    ("      weight_decay = 0.1", "      weight_decay = 0.1.1", "E0105"),
    ("      clip         = 1.0", "      clip         = ", "E0108"),
    ("      constant 20 steps", "      constantly 20 steps", "E0704"),
    ("    seed = 3", "    seed = 3 + 1GB", "E0305"),
    ("      every = 50 steps", "      every = 50 tokens", "E0301"),
    ("      keep  = 3", "      keep  = 3 keep", "E0302"),
    ("      every = 10 steps", "      every = 10min", "E0301"),
    ("    source     = python_stdlib", '    source     = "python', "E0106"),
    ("    tokenizer  = train(4096)", "    tokenizer  = train(40)", "E0303"),
    ("    validation = 5%", "    validation = 500%", "E0303"),
    ("let width = 64", "let width = 64 / 0", "E0305"),
    ("  init_std = 0.02", "  init_std = 'x'", "E0105"),
    ("  norm_eps = 1e-6", "  norm_eps = = 1e-6", "E0108"),
    ("    heads      = 4", "    head       = 4", "E0201"),
    ("    query_rank = 96", "    query_rank = [96]", "E0302"),
    ("      nope  = 32", "      nope  = nop", "E0401"),
    ("      theta = 10_000", "      theta = -10_000", "E0303"),
    ("      inner = 512", "      inner = 512 * ", "E0108"),
    ("      shared     = 1", "      shared     = one", "E0401"),
    ("      score      = sigmoid", "      score      = sigmoit", "E0304"),
    ("      normalize  = true", "      normalize  = maybe", "E0304"),
    ("        bias_rate     = 0.001 until 50 steps then 0", "        bias_rate     = 0.001 until 50 steps", "E0703"),
    ("        sequence_loss = 1e-4", "        sequence_loss = 1e-4 $", "E0105"),
    ("    weight = 0.3 until 10 steps then 0.1", "    weight = 0.3 til 10 steps then 0.1", "E0703"),
    ("      cores  = 2", "      cores  = 2, cores = 3", "E0202"),
    ("      memory = 4GB", "      memory = 4Gb", "E0301"),
    ("      price  = 2USD/h", "      price  = 2USD/x", "E0301"),
)


def errors(text: str) -> list[tuple[int, str]]:
    """(line, code) of every error."""
    analysis = analyse("spec.dsc", reader=lambda _: (Source("spec.dsc", text), ()))
    return [(item.span.line if item.span else 0, item.code) for item in analysis.diagnostics]


def planted(mistakes: list[tuple[str, str, str]]) -> tuple[str, list[tuple[int, str]]]:
    """RIGHT with some mistakes, and the expected errors."""
    lines = RIGHT.split("\n")
    expected = []
    for line, wrong, code in mistakes:
        assert lines.count(line) == 1, line
        number = lines.index(line)
        lines[number] = wrong
        expected.append((number + 1, code))
    return "\n".join(lines), sorted(expected)


def test_the_spec_is_right() -> None:
    assert errors(RIGHT) == [] and errors(BASE) == []


@pytest.mark.parametrize("index", range(len(MISTAKES)), ids=lambda index: MISTAKES[index][1].split()[0])
def test_one_mistake_is_one_error(index: int) -> None:
    text, expected = planted([MISTAKES[index]])
    assert errors(text) == expected


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_so_many_mistakes_are_so_many_errors(count: int) -> None:
    chooser = random.Random(count)
    for _ in range(120):
        text, expected = planted(chooser.sample(MISTAKES, count))
        assert errors(text) == expected, text


def test_all_mistakes_at_once() -> None:
    text, expected = planted(list(MISTAKES))
    assert errors(text) == expected

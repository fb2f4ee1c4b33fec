"""The interface of lm-evaluation-harness, called as the harness calls it, against sums over the reference's logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.tools.inference.harness import DscModel
from runtime.data import tokenizer
from tests.compiler.tools.inference.test_commands import config, logical
from tests.reference.model import Reference

LENGTH = 16  # tokens that a prediction sees at most


@dataclass
class Instance:
    """An `Instance` with only the attributes that a model reads."""

    args: tuple[Any, ...]


@dataclass
class Judge:
    """The expected result, by the reference, one prediction after the other."""

    reference: Reference
    bpe: Any

    def encode(self, text: str) -> list[int]:
        return tokenizer.encode(self.bpe, [text])[0]

    @torch.no_grad()
    def logprobs(self, seen: list[int]) -> torch.Tensor:
        tokens = torch.tensor([seen[-LENGTH:]])
        return self.reference(tokens, tokens).logits_BSV[0, -1].log_softmax(dim=0)


@pytest.fixture(scope="module")
def model(trained: Path) -> DscModel:
    return DscModel(str(trained), dtype="fp64")


@pytest.fixture(scope="module")
def judge(trained: Path) -> Judge:
    reference = Reference(config(trained))
    reference.load_state_dict({name: tensor.double() for name, tensor in logical(trained).items()})
    (path,) = (trained / "data").glob("*/tokenizer.json")
    return Judge(reference, tokenizer.parse(path.read_bytes()))


PAIRS = [
    ("import", " os"),
    ("", "def"),
    ("def f(x): ", "return x"),  # the space belongs to the continuation
    ("class A:\n    def __init__(self, a, b, c):\n        self.a =", " a"),  # more than the model sees
    ("x", ""),
]


def test_loglikelihood(model: DscModel, judge: Judge) -> None:
    scores = model.loglikelihood([Instance(pair) for pair in PAIRS])
    for (context, continuation), (value, is_greedy) in zip(PAIRS, scores, strict=True):
        ids, before = judge.encode(context + continuation), judge.encode(context.rstrip())
        window = [model.eot_token_id, *ids][-(LENGTH + 1) :]  # the last tokens of both together
        expected, greedy = 0.0, True
        for index in range(len(window) - (len(ids) - len(before)), len(window)):
            logprobs_V = judge.logprobs(window[:index])
            expected += float(logprobs_V[window[index]])
            greedy &= int(logprobs_V.argmax()) == window[index]
        assert math.isclose(value, expected, abs_tol=1e-9) and is_greedy == greedy, (context, continuation)


def test_the_likeliest_continuation_is_greedy(model: DscModel) -> None:
    (text,) = model.generate_until([Instance(("import", {"until": [], "max_gen_toks": 4, "do_sample": False}))])
    ((_, is_greedy), (_, is_other_greedy)) = model.loglikelihood(
        [Instance(("import", text)), Instance(("import", "$$"))]
    )
    assert is_greedy and not is_other_greedy


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x\n", "import os\nimport sys\n\n\nclass Tree:\n    pass\n" * 4, "x", ""]
)
def test_loglikelihood_rolling(model: DscModel, judge: Judge, text: str) -> None:
    """Every token counts once, in the windows of the harness; the last window has the longest possible context."""
    (nats,) = model.loglikelihood_rolling([Instance((text,))])
    ids = judge.encode(text)
    tokens, expected = [model.eot_token_id, *ids], 0.0
    for index in range(1, len(tokens)):
        start = (index - 1) // LENGTH * LENGTH
        if start + LENGTH >= len(tokens):
            start = max(0, len(tokens) - 1 - LENGTH)
        expected += float(judge.logprobs(tokens[start:index])[tokens[index]])
    assert math.isclose(nats, expected, abs_tol=1e-9)
    assert len(ids) <= LENGTH or len(text) > 20


def test_generate_until(model: DscModel) -> None:
    def written(**settings: Any) -> str:
        return model.generate_until([Instance(("import os", {"do_sample": False, "max_gen_toks": 12, **settings}))])[0]

    full_text = written(until=[])
    assert len(full_text) > 3
    for word in (full_text[2:4], full_text[-2:]):
        assert written(until=[word]) == written(until=word) == full_text[: full_text.index(word)]
    assert written(until=["\0nothing"]) == full_text
    drawn = {written(until=[], do_sample=True, temperature=1.0, seed=seed) for seed in range(4)}
    assert len(drawn) > 1


def test_results_are_added_to_the_cache_of_the_harness(model: DscModel) -> None:
    cached: list[tuple[str, Any, Any]] = []

    class Hook:
        def add_partial(self, *row: Any) -> None:
            cached.append(row)

    model.set_cache_hook(Hook())
    scores = model.loglikelihood([Instance(pair) for pair in PAIRS[:2]])
    assert cached == [("loglikelihood", pair, result) for pair, result in zip(PAIRS[:2], scores, strict=True)]
    model.set_cache_hook(None)


def test_a_class_of_the_harness_can_be_joined(trained: Path) -> None:
    """The class has all abstract methods of the harness's class."""
    import abc

    class LM(abc.ABC):
        def __init__(self) -> None:
            raise AssertionError("not called")

        @abc.abstractmethod
        def loglikelihood(self, requests: Any) -> Any: ...

        @abc.abstractmethod
        def loglikelihood_rolling(self, requests: Any) -> Any: ...

        @abc.abstractmethod
        def generate_until(self, requests: Any) -> Any: ...

        @property
        def rank(self) -> int:
            raise AssertionError("not called")

    class Model(DscModel, LM):
        """A model of dsc."""

    joined = Model(str(trained))
    assert isinstance(joined, LM) and (joined.rank, joined.world_size) == (0, 1)
    assert joined.loglikelihood([Instance(("import", " os"))])[0][0] < 0

"""Several sources in one prepared folder: split and cached separately, encoded by one tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime.contract import BlendSource, DataRecipe, DataRequest, TrainedTokenizer
from runtime.data.blend import Blend, SourceShare
from runtime.data.blended import prepare_data
from runtime.data.files import DataError
from runtime.data.order import Order
from runtime.data.prepare import PreparedFolder
from runtime.data.samples import BlendSamples, Samples, samples_of
from runtime.data.shards import ShardReader

SOURCES = (BlendSource("web", "web/*.txt", 7), BlendSource("code", "code/*.txt", 3))
REQUEST = DataRequest(DataRecipe(None, TrainedTokenizer(270), 0.3, sources=SOURCES), 400, 7)
Prepare = Callable[..., PreparedFolder]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    for name, words in (("web", "a cat sat here "), ("code", "def x return y ")):
        (tmp_path / name).mkdir()
        for number in range(8):
            (tmp_path / name / f"{number}.txt").write_text(words * (9 + number) + f"{name} {number}")

    def run(out: str = "run", request: DataRequest = REQUEST, **more: object) -> PreparedFolder:
        cache = tmp_path / "cache"
        return prepare_data(request, tmp_path, tmp_path / out, lambda *_: None, cache=cache, **more)  # type: ignore[arg-type]

    return run


def test_each_source_is_prepared_and_divided(prepare: Prepare) -> None:
    prepared = prepare()
    assert not prepared.reused
    for source in ("web", "code"):
        splits = prepared.meta["sources"][source]
        assert splits["train"]["documents"] + splits["validation"]["documents"] == 8
        for split, facts in splits.items():
            assert facts["documents"] > 0
            assert ShardReader(prepared.folder / f"{source}.{split}").num_tokens == facts["tokens"]
    assert {"web", "code"} == {name.partition(":")[0] for name in prepared.meta["held_out"]}


def test_changed_weights_need_no_new_preparation(prepare: Prepare) -> None:
    """The folder does not depend on weights, and a resume finds it without the text."""
    first = prepare()
    recipe = replace(REQUEST.data, sources=(replace(SOURCES[0], weight=1), SOURCES[1]))
    again = prepare(request=replace(REQUEST, data=recipe))
    assert again.reused and again.folder == first.folder and again.meta["sha256"] == first.meta["sha256"]
    resumed = prepare(request=replace(REQUEST, data=recipe), resumed=[first.meta["sha256"]])
    assert resumed.folder == first.folder


def test_a_source_is_encoded_once_for_several_blends(prepare: Prepare, tmp_path: Path) -> None:
    """With a tokenizer file, another blend has the same files for a source."""
    first = prepare()
    tokenizer = str(first.folder / "tokenizer.json")
    data = replace(REQUEST.data, tokenizer=tokenizer)
    prepare("both", replace(REQUEST, data=data))
    alone = prepare("alone", replace(REQUEST, data=replace(data, sources=SOURCES[:1])))
    assert alone.reused
    assert (alone.folder / "web.train.bin").read_bytes() == (first.folder / "web.train.bin").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("alone/.*")) == [".lock"], "nothing is left beside it"


def test_a_missing_source_is_named(prepare: Prepare) -> None:
    sources = (SOURCES[0], BlendSource("books", "books/*.txt", 1))
    with pytest.raises(DataError, match=r"books/\*\.txt"):
        prepare(request=replace(REQUEST, data=replace(REQUEST.data, sources=sources)))


def test_samples_of_a_blend_equal_those_of_its_sources(prepare: Prepare) -> None:
    folder, shares = prepare().folder, []
    for source in SOURCES:
        tokens = ShardReader(folder / f"{source.name}.train").num_tokens
        shares.append(SourceShare(source.name, source.weight, Order(8, (tokens - 2) // 8, 5)))
    blend = Blend(tuple(shares))
    samples = samples_of(folder, "train", 8, 2, seed=5, chat=None, order=blend)
    assert isinstance(samples, BlendSamples)
    alone = [Samples(folder, "train", 8, 2, seed=5, source=source.name) for source in SOURCES]
    for index in range(60):
        number, of_source = blend.place(index)
        assert np.array_equal(samples.tokens(index), alone[number].tokens(of_source))
        assert np.array_equal(samples.starts(index), alone[number].starts(of_source))
        assert samples.causal_pairs(np.array([index])) == alone[number].causal_pairs(np.array([of_source]))

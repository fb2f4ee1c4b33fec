"""The text that was prepared for a run, for what `dsc plan` says of `order = cost`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from compiler.predict.prediction import OrderGain
from compiler.program.lower import Lowering
from compiler.schedule.schedule import Schedule
from dsl.schema import Spec

if TYPE_CHECKING:
    from runtime.data.samples import AnySamples


def order_gain(spec: Spec, lowering: Lowering, schedule: Schedule, folder: Path, cache: Path) -> OrderGain | None:
    """The gain of `order = cost` on data in a cache; None without the key, where the cache has no such data, or where
    it comes from several sources. `folder`: where the paths of the data start."""
    if spec.schedule.order != "cost" or not cache.is_dir():
        return None
    text = _prepared(spec, folder, cache)
    if text is None:
        return None
    from compiler.predict.order_gain import gain_on
    from runtime.data.errors import DataError

    try:
        return gain_on(samples_in(spec, text), spec, lowering, schedule, str(text))
    except DataError:  # too short a text: the run will say so
        return None


def samples_in(spec: Spec, text: Path) -> AnySamples:
    """The training samples of a prepared text."""
    from compiler.emit.recipe import data_request
    from runtime.contract import EXTRA_TOKENS
    from runtime.data.samples import samples_of

    chat = data_request(spec).data.chat
    return samples_of(text, "train", spec.train.sequence, EXTRA_TOKENS, seed=spec.train.seed, chat=chat)


def _prepared(spec: Spec, folder: Path, cache: Path) -> Path | None:
    """The folder of a cache with the text of a spec, if it was prepared and has not changed."""
    from compiler.emit.recipe import data_request
    from runtime.data import store
    from runtime.data.errors import DataError
    from runtime.data.prepare import asked_for, task_of

    request = data_request(spec)
    if request.data.sources:
        return None
    asked = asked_for(request)
    metas = (store.meta_of(each) for each in store.folders(cache))
    if not any(meta is not None and meta.get("request") == asked for meta in metas):
        return None  # the text need not be read
    try:
        text = cache / task_of(request, folder, lambda *_: None).key
    except (DataError, OSError):  # the run will say so
        return None
    return text if store.verified(text) is not None else None

"""Indexers: what they read, and the phase of a run in which they alone are trained."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.rules.finding import Finding
from dsl.schema import Compressed, Mla, Spec


def indexers_read_what_attention_makes(spec: Spec) -> Iterator[Finding]:
    """An indexer makes its queries of the latent of queries, and rotates as many columns as attention does."""
    for path, attention in spec.model.attentions:
        if not isinstance(attention, Mla | Compressed) or attention.indexer is None:
            continue
        if isinstance(attention, Compressed):
            at, of = f"{path}.compress.indexer", f"{path}.rope.width"
            rope = (attention.rope.width or attention.head_dim) if attention.rope else 0
        else:
            at, of, rope = f"{path}.indexer", f"{path}.head_dim.rope", attention.head_dim.rope
        dim = attention.indexer.head_dim
        if attention.query_rank is None:
            message = "an indexer reads the latent of queries, and query_rank = none"
            note = ("queries without a latent", f"{path}.query_rank")
            yield Finding("E0950", message, at, "remove `indexer`", (note,))
        if dim < rope:
            message = f"head_dim = {dim:,}, and as many columns of an indexer are rotated as of a head: {rope:,}"
            note = ("the rotated columns", of)
            yield Finding("E0950", message, f"{at}.head_dim", f"write `head_dim = {rope}`", (note,))


def what_alone_is_trained_exists(spec: Spec) -> Iterator[Finding]:
    """Some attention has an indexer, and nothing else says what is trained."""
    if spec.train.only is None:
        return
    if not any(isinstance(each, Mla | Compressed) and each.indexer for _, each in spec.model.attentions):
        message = f"only = indexer, and no attention of model {spec.model.name} has one"
        yield Finding("E0951", message, "train.only", "remove `only`", (("the model", "model"),))
    if spec.adapter is not None:
        message = "only = indexer, and the run trains adapters alone"
        yield Finding("E0951", message, "train.only", "remove `only`", (("the adapters", "adapter"),))
    validate = spec.train.validate
    if validate is not None and validate.ema:
        message = "only = indexer: the weights that stay as they are have no average to be validated"
        note = (("what alone is trained", "train.only"),)
        yield Finding("E0951", message, "train.validate.ema", "write `ema = false`", note)


def still_weights_are_whole(spec: Spec) -> Iterator[Finding]:
    """Weights that stay as they are lie whole on each of their holders."""
    if spec.train.only is not None and spec.parallel.zero == 3 and spec.parallel.data > 1:
        message = "zero = 3 divides weights that are trained; all but the indexers stay as they are, whole on each rank"
        hint = "write `zero = 2`, and more pipeline or expert ranks"
        yield Finding("E0944", message, "parallel.zero", hint, (("what alone is trained", "train.only"),))

"""The balance of experts with a bias, with the sequence-wise loss, with both and with neither.

    make study-balance

The page only has numbers and their definitions, and no conclusions that other results could contradict.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.studies import picture
from benchmarks.studies.pages import (
    Written,
    last_steps,
    losses,
    mean_curve,
    paragraph,
    spread,
    table,
    tokens_of,
    trained,
)
from benchmarks.studies.records import Record, Results, last
from benchmarks.studies.study import ROOT, Study, Variant, window_of
from dsl.load import resolve
from dsl.schema import Moe

PAGE = ROOT / "docs" / "balancing.md"
PICTURE = ROOT / "docs" / "pictures" / "balancing.svg"
BALANCE = "model.layers.1.ffn.balance"
NO_BIAS, NO_LOSS = f"{BALANCE}.bias_rate=none", f"{BALANCE}.sequence_loss=0"
NOTHING = Variant("none", "nothing", "nothing", (NO_BIAS, NO_LOSS))
STUDY = Study(
    "balance",
    (
        NOTHING,
        Variant("sequence", "sequence loss 0.0001", "sequence loss", (NO_BIAS,)),
        Variant("bias", "bias rate 0.01", "bias", (NO_LOSS,)),
        Variant("both", "both", "both", ()),
    ),
)


class Chance(NamedTuple):
    """Load of the busiest expert over the mean, if each token chose at random."""

    step: float  # in one step
    together: float  # in several steps together


def written(results: Results) -> Written:
    """The page and the picture of these results."""
    return Written(PAGE, page(STUDY, results), PICTURE, drawing(STUDY, results))


def page(study: Study, results: Results) -> str:
    """docs/balancing.md."""
    variants = [variant for variant in study.variants if results.of(variant)]
    parts = (
        _head(study, results),
        _table(study, results, variants),
        _layers(results, variants),
        _seeds(results, variants),
    )
    return "\n".join(parts)


# ---------------------------------------------------------------- figures


def imbalance(record: Record) -> float:
    """Load of the busiest expert over the mean in one step, averaged over the last tenth of the steps and layers."""
    return statistics.fmean(last(curve) for curve in record.imbalance.values())


def together(record: Record) -> float:
    """Load of the busiest expert over the mean in the last tenth of the steps together, averaged over layers."""
    return statistics.fmean(max(load) / statistics.fmean(load) for load in record.loads.values())


def idle(record: Record) -> float:
    """Load of the least busy expert over the mean in the same steps, averaged over layers."""
    return statistics.fmean(min(load) / statistics.fmean(load) for load in record.loads.values())


def chance(moe: Moe, tokens: int, steps: int) -> Chance:
    """The balance of random choices within the limit of groups, in steps of `tokens` tokens. From a fixed seed."""
    rng = np.random.default_rng(0)
    loads = np.stack([_random_load(rng, moe, tokens) for _ in range(steps)])
    total = loads.sum(0)
    return Chance(float((loads.max(1) / loads.mean(1)).mean()), float(total.max() / total.mean()))


def _random_load(rng: np.random.Generator, moe: Moe, tokens: int) -> np.ndarray:
    """Tokens of each expert: groups are drawn first, then experts in them."""
    group_TG = rng.random((tokens, moe.groups)).argsort(axis=1)[:, : moe.top_groups]
    group_E = np.arange(moe.experts) // (moe.experts // moe.groups)
    open_TE = (group_TG[:, :, None] == group_E).any(axis=1)
    score_TE = np.where(open_TE, rng.random((tokens, moe.experts)), -1.0)
    return np.bincount(score_TE.argsort(axis=1)[:, -moe.top_k :].ravel(), minlength=moe.experts)


def _moe(study: Study) -> Moe:
    model = resolve(study.spec, None, study.overrides).spec.model
    return next(span.ffn for span in model.layers if isinstance(span.ffn, Moe))


# ---------------------------------------------------------------- the page


def _head(study: Study, results: Results) -> str:
    moe, link = _moe(study), PICTURE.relative_to(PAGE.parent).as_posix()
    purpose = paragraph("""
        This page shows how evenly tokens spread over experts with each way to balance them, and what that does to the
        loss. Without balancing, a router sends most tokens to few experts, and other devices wait. A spec has the two
        ways of DeepSeek-V3 (arXiv 2412.19437, §2.1.2). `bias_rate`: each expert has a **bias** that counts only when
        experts are chosen; after each step it goes up if the expert had fewer tokens than the mean, and down if it had
        more. `sequence_loss`: a **sequence-wise loss** grows when the tokens of one sequence choose the same experts.
    """)
    method = paragraph(f"""
        `make study-balance` trains the variants and writes this page, in some 10 minutes. {trained(study, results)} A
        MoE layer has {moe.experts} experts in {moe.groups} groups; a token
        chooses {moe.top_k} experts, all in {moe.top_groups} groups.
    """)
    return f"# How evenly experts are loaded\n\n{purpose}\n\n{method}\n\n![Load of the busiest expert]({link})\n"


def _table(study: Study, results: Results, there: Sequence[Variant]) -> str:
    steps, moe = last_steps(results), _moe(study)
    random = chance(moe, tokens_of(study), steps)
    intro = paragraph(f"""
        Load is the tokens of an expert divided by the mean of its layer: 1 is even. The first column is the busiest
        expert of each step; the next two count all {steps} steps together. Losses are in nats per token; validation
        uses held-out files at the end. Numbers are means of the layers and seeds, with the least and the greatest seed
        in brackets.
    """)
    limits = paragraph(f"""
        With random choices, the busiest expert would have a load of {random.step:.2f} in a step, and of
        {random.together:.2f} in {steps} steps together. The greatest possible load is {moe.experts / moe.top_k:g}:
        every token chooses the same expert.
    """)
    head = (
        "balanced by",
        "busiest, in a step",
        f"busiest, in {steps} steps",
        f"least busy, in {steps} steps",
        "loss",
        "validation loss",
    )
    rows = [_row(variant.title, results.of(variant)) for variant in there]
    return f"## The last {steps} steps\n\n{intro}\n\n{table(head, rows)}\n\n{limits}\n"


def _row(title: str, records: Sequence[Record]) -> tuple[str, ...]:
    validations = [r.validation_loss for r in records if r.validation_loss is not None]
    return (
        title,
        spread([imbalance(r) for r in records], 2),
        spread([together(r) for r in records], 2),
        spread([idle(r) for r in records], 2),
        spread(losses(records), 3),
        spread(validations, 3) if validations else "",
    )


def _layers(results: Results, there: Sequence[Variant]) -> str:
    window = window_of(results.steps)
    points = _points(results.steps // window)
    rows = []
    for variant in there:
        for layer in results.layers():
            curve = mean_curve([record.imbalance[layer] for record in results.of(variant)])
            rows.append((f"{variant.title}: {layer}", *(f"{curve[index]:.2f}" for index in points)))
    intro = paragraph(f"""
        Load of the busiest expert in a step, the mean of {window} steps and of the seeds.
    """)
    head = ("balanced by: layer", *(f"{index * window + 1}–{(index + 1) * window}" for index in points))
    return f"## Each layer over time\n\n{intro}\n\n{table(head, rows)}\n"


def _points(count: int) -> list[int]:
    """Windows of a table: the first, then each four times as late, and the last."""
    return sorted({0, count - 1, *(4**k for k in range(count.bit_length()) if 4**k < count)})


def _seeds(results: Results, there: Sequence[Variant]) -> str:
    """The loss of each seed, and its difference to the run without any balancing."""
    base = {record.seed: record.last_loss for record in results.of(NOTHING)}
    if not base:
        return ""
    rows = []
    for variant in there:
        by_seed = {record.seed: record.last_loss for record in results.of(variant)}
        cells = (
            f"{by_seed[seed]:.3f} ({by_seed[seed] / base[seed] - 1:+.2%})" if seed in by_seed else "" for seed in base
        )
        rows.append((variant.title, *cells))
    apart = f"Without balancing, the seeds are {max(base.values()) / min(base.values()) - 1:.2%} apart."
    intro = paragraph(f"""
        Loss of the last steps; in brackets, the difference to the same seed without balancing.
        {apart if len(base) > 1 else ""}
    """)
    return f"## The loss of each seed\n\n{intro}\n\n{table(('balanced by', *(f'seed {s}' for s in base)), rows)}\n"


def drawing(study: Study, results: Results) -> str:
    """Curves of the load, averaged over layers and by layer, and of the loss; each averaged over seeds."""
    variants = [variant for variant in study.variants if results.of(variant)]
    window, labels = window_of(results.steps), [variant.label for variant in variants]
    layers = {
        layer: [mean_curve([r.imbalance[layer] for r in results.of(variant)]) for variant in variants]
        for layer in results.layers()
    }
    mean_of_layers = [mean_curve(curves) for curves in zip(*layers.values(), strict=True)]
    loss = [mean_curve([r.loss for r in results.of(variant)]) for variant in variants]
    halves = [picture.half(layer, picture.series(labels, curves, window)) for layer, curves in layers.items()]
    title = "Load of the busiest expert, by step: mean of layers"
    rows = [
        [picture.wide(title, picture.series(labels, mean_of_layers, window))],
        *(halves[start : start + 2] for start in range(0, len(halves), 2)),
        [picture.wide("Training loss by step, nats per token", picture.series(labels, loss, window))],
    ]
    return picture.svg(title, rows)

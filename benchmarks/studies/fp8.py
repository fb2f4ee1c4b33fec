"""The difference between the losses of FP8 and BF16 training, and the contribution of each part of the recipe.

    make study-fp8

Every statement of the page follows from its numbers, so other results change it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

from benchmarks.studies import picture
from benchmarks.studies.pages import Written, last_steps, losses, mean_curve, paragraph, spread, table, trained
from benchmarks.studies.records import Record, Results
from benchmarks.studies.study import ROOT, Study, Variant, window_of
from compiler.tools.report.charts import Chart

PAGE = ROOT / "docs" / "fp8.md"
PICTURE = ROOT / "docs" / "pictures" / "fp8.svg"
GOAL = 0.0025  # relative difference of the losses: arXiv 2412.19437, §3.3
FP8 = "precision=fp8_block"
BF16 = Variant("bf16", "bf16", "bf16", ("precision=bf16",))
RECIPE = Variant("fp8_block", "fp8_block", "fp8_block", (FP8,))
LARGER = f"model.init_std={0.02 * (1 + 2.0**-8)!r}"  # 0.02 is the quickstart's
APART = Variant("bf16_apart", "bf16, initial weights larger by 2⁻⁸", "bf16, larger", ("precision=bf16", LARGER))
PARTS = (  # variants of the recipe, each without one part
    Variant(
        "fp8_squares",
        "fp8_block, activations in 128×128 tiles",
        "128×128 tiles",
        (FP8, "precision.activation_tile=128x128", "precision.dispatch=bf16"),
    ),
    Variant(
        "fp8_no_promotion",
        "fp8_block, sums of products in 14 bits, no promotion",
        "no promotion",
        (FP8,),
        "benchmarks.studies.accumulator",
    ),
    Variant("fp8_no_master", "fp8_block, no FP32 master weights", "no master", (FP8, "precision.master=bf16")),
)
STUDY = Study(
    "fp8",
    (
        BF16,
        Variant("fp32", "fp32", "fp32", ("precision=fp32",)),
        APART,
        RECIPE,
        Variant("mxfp8", "mxfp8", "mxfp8", ("precision=mxfp8",)),
        Variant("nvfp4", "nvfp4", "nvfp4", ("precision=nvfp4",)),
        *PARTS,
    ),
)


def written(results: Results) -> Written:
    """The page and the picture of these results."""
    return Written(PAGE, page(STUDY, results), PICTURE, drawing(STUDY, results))


def page(study: Study, results: Results) -> str:
    """docs/fp8.md."""
    variants = [variant for variant in study.variants if results.of(variant)]
    parts = (_head(study, results), _table(results, variants), _parts(results), _missing(study, results), ROWS)
    return "\n".join(part for part in parts if part)


def differences(results: Results, variant: Variant, to: Variant = BF16) -> dict[int, float]:
    """By seed: the relative difference of the last loss to that of another variant with the same seed."""
    base = {record.seed: record.last_loss for record in results.of(to)}
    return {r.seed: r.last_loss / base[r.seed] - 1 for r in results.of(variant) if r.seed in base}


# ---------------------------------------------------------------- the page


def _head(study: Study, results: Results) -> str:
    link = PICTURE.relative_to(PAGE.parent).as_posix()
    finding = paragraph(f"On a small model, {_goal(results)} One run of this page:")
    command = f"    dsc train {study.spec.relative_to(ROOT).as_posix()} -s {FP8} -s train.seed=1"
    method = paragraph(f"""
        `make study-fp8` trains all variants and writes this page, in some 20 minutes.
        {trained(study, results)}
    """)
    picture = f"![Loss beside that of BF16, and the loss of BF16]({link})"
    return f"# FP8 beside BF16\n\n{finding}\n\n{command}\n\n{method}\n\n{picture}\n"


def _table(results: Results, there: Sequence[Variant]) -> str:
    steps, base = last_steps(results), losses(results.of(BF16))
    seeds = [record.seed for record in results.of(BF16)]
    rows = []
    for variant in there:
        by_seed = differences(results, variant) if variant != BF16 else {}
        mean = _mean(by_seed.values()) if by_seed else ""
        cells = [f"{by_seed[seed]:+.2%}" if seed in by_seed else "" for seed in seeds]
        rows.append((variant.title, spread(losses(results.of(variant)), 4), mean, *cells))
    intro = paragraph("""
        *loss* is the mean training loss of these steps in nats per token, averaged over seeds (least – greatest). *to
        bf16* is the relative difference to bf16 with the same seed: the mean with its
        standard error, then each seed.
    """)
    head = ("precision", "loss", "to bf16", *(f"seed {seed}" for seed in seeds))
    apart = f"Runs of bf16 with different seeds are {max(base) / min(base) - 1:.2%} apart." if len(base) > 1 else ""
    notes = paragraph(f"{apart} {_noise(results)}")
    return f"## The last {steps} steps\n\n{intro}\n\n{table(head, rows)}\n\n{notes}\n"


def _noise(results: Results) -> str:
    """The effect of a meaningless change."""
    effects = differences(results, APART).values()
    if not effects:
        return ""
    return f"""
        Initial weights that are larger by 2⁻⁸, one rounding to BF16, move the loss of a seed by up to
        {max(map(abs, effects)):.2%}, so a difference of this size says nothing about a precision.
    """


def _goal(results: Results) -> str:
    """Whether the mean of FP8 reaches the goal, and whether there are enough seeds to tell."""
    effects, apart = differences(results, RECIPE).values(), differences(results, APART).values()
    if len(effects) < 2:
        return f"the goal, a mean loss of fp8_block within {GOAL:.2%} of bf16, is not measured yet."
    mean = statistics.fmean(effects)
    text = (
        f"the mean loss of fp8_block is {'within' if abs(mean) <= GOAL else 'not within'} {GOAL:.2%} of bf16, the goal."
    )
    error = max(_error(values) for values in (effects, apart) if len(values) > 1)
    if error > GOAL:
        return f"{text} But a standard error is up to {error:.2%}, so more seeds or a larger model must confirm it."
    return text


def _parts(results: Results) -> str:
    """The contribution of each part of the recipe, as far as a few seeds can show it."""
    seeds = [record.seed for record in results.of(RECIPE)]
    by_part = {part: differences(results, part, RECIPE) for part in PARTS}
    rows = [
        (part.title, _mean(by_seed.values()), *(f"{by_seed[seed]:+.2%}" if seed in by_seed else "" for seed in seeds))
        for part, by_seed in by_part.items()
        if by_seed
    ]
    if not rows:
        return ""
    several = {part.label: [*by_seed.values()] for part, by_seed in by_part.items() if len(by_seed) > 1}
    larger = [name for name, values in several.items() if abs(statistics.fmean(values)) > 2 * _error(values)]
    smaller = [name for name in several if name not in larger]
    intro = paragraph("""
        The losses relative to fp8_block with the same seed show what each part is worth. In
        DeepSeek-V3's paper, a model of 16B parameters diverged with gradients of activations in blocks of 128×128
        (arXiv 2412.19437, appendix B.2).
    """)
    notes = paragraph(f"""
        {f"More than twice their standard error: {', '.join(larger)}." if larger else ""}
        {f"Not visible at this size, less than twice their standard error: {', '.join(smaller)}." if smaller else ""}
    """)
    head = ("variant", "to fp8_block", *(f"seed {seed}" for seed in seeds))
    return (
        "\n\n".join(("## Without a part of the recipe", intro, table(head, rows), *([notes] if notes else []))) + "\n"
    )


def _mean(values: Collection[float]) -> str:
    error = f" ± {_error(values):.2%}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.2%}{error}"


def _error(values: Collection[float]) -> float:
    """The standard error of the mean, for at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _missing(study: Study, results: Results) -> str:
    """Variants without a result, with the reason by dsc."""
    rows = [
        f"- {variant.title}: {results.refused.get(variant.name, 'not trained yet')}"
        for variant in study.variants
        if not results.of(variant)
    ]
    return "\n".join(("## Not measured\n", *rows, "")) if rows else ""


ROWS = """## What the rows are

- `fp32`, `bf16`, `fp8_block`, `mxfp8`, `nvfp4`: the recipes of [precision.md](precision.md).
- 128×128 tiles: activations and their gradients share a scale over 128 tokens, not one per token.
- No FP32 master weights: the optimizer updates the BF16 weights.
- No promotion: the tensor cores of an H800 sum FP8 products in about 14 bits, and DeepSeek-V3 adds these sums to FP32
  every 128 products (arXiv 2412.19437, §3.3.2). This row does not: it cuts the sum to 14 bits, towards zero, after each
  32 products ([accumulator.py](../benchmarks/studies/accumulator.py)). The other rows never cut sums, which is more
  exact than an H800. Sums of this model have at most 1,024 products; the paper finds errors of nearly 2% in sums
  of 4,096.
"""


def drawing(study: Study, results: Results) -> str:
    """Curves of the relative difference to BF16, of variants of the recipe to the recipe, and of BF16's loss, averaged
    over seeds.
    """
    rows = [[panel] for panel in (_panel(study, results, BF16), _panel(study, results, RECIPE)) if panel]
    if base := results.of(BF16):
        loss = picture.series(["bf16"], [mean_curve([record.loss for record in base])], window_of(results.steps))
        rows.append([picture.wide("Training loss of bf16 by step, nats per token", loss)])
    return picture.svg("Training loss beside that of bf16", rows)


def _panel(study: Study, results: Results, to: Variant) -> Chart | None:
    """Differences to BF16, or of variants of the recipe to the recipe."""
    base = {record.seed: record for record in results.of(to)}
    variants = PARTS if to == RECIPE else [variant for variant in study.variants if variant not in (*PARTS, BF16)]
    measured = [variant for variant in variants if differences(results, variant, to)]
    if not measured:
        return None
    curves = [
        mean_curve([_relative(record, base[record.seed]) for record in results.of(variant) if record.seed in base])
        for variant in measured
    ]
    drawn = picture.series([variant.label for variant in measured], curves, window_of(results.steps))
    dashed = "; dashed where the name is in italics" if len(measured) > len(picture.COLOURS) else ""
    return picture.wide(f"Difference of the training loss to that of {to.label} by step, in percent{dashed}", drawn)


def _relative(record: Record, base: Record) -> list[float]:
    """The difference of the loss to that of `base` by window, in percent."""
    return [100 * (a / b - 1) for a, b in zip(record.loss, base.loss, strict=True)]

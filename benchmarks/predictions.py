"""Compare dsc's predictions with published numbers, as docs/predictions.md.

    python -m benchmarks.predictions [--check]

benchmarks/predictions.json fixes what is compared: the split of the layers, the rate tables, the rank. The page reports
missed goals as well as met ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rates_of
from compiler.plan.split_blocks import balanced_rows
from compiler.predict.interval import CONFIDENCE
from compiler.predict.predict import mfu_of, predict
from compiler.predict.prediction import Prediction, StepPrediction
from compiler.predict.rank_use import class_seconds
from compiler.tools.report.prediction_text import count, ranges
from dsl.load import resolve
from dsl.resolve.chosen import phases_in
from dsl.schema import Spec

ROOT = Path(__file__).parent.parent
FIXED = ROOT / "benchmarks" / "predictions.json"
PAGE = ROOT / "docs" / "predictions.md"
GIB = 2**30
NAMES = {
    "seconds": "step",
    "forward_s": "1F, forwards alone",
    "backward_s": "1B, backwards alone",
    "weight_s": "1W, weight gradients alone",
    "overlapped_s": "1F1B, overlapped pairs",
    "bubble_s": "bubble",
    "optimizer_s": "optimizer, reduction in it",
}
# (run, key of `kernels`): runs whose ops would take long on torch.
WITHOUT_KERNELS = (
    ("deepseek-v3.2.dsc:v32.sparse", "sparse_attention"),
    ("deepseek-v4-flash.dsc", "sparse_attention"),
    ("deepseek-v4-flash.dsc", "compressed_attention"),
)
# Groups of kernel classes in the public profile: (title, classes, milliseconds of a MoE layer).
TRACE = (
    ("dense products", ("gemm",), 4.71),
    ("grouped products", ("grouped_gemm",), 5.73),
    ("weight gradients", ("wgrad", "grouped_wgrad"), 6.49),
    ("attention", ("attention", "attention_backward"), 5.02),
    ("memory-bound and small kernels", (), 8.88),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is not current")
    args = parser.parse_args()
    text = page()
    if args.check:
        return int(PAGE.read_text("utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def page() -> str:
    """The whole page."""
    fixed = json.loads(FIXED.read_text("utf-8"))
    spec = resolve(ROOT / fixed["run"], overrides=fixed["overrides"]).spec
    v2 = resolve(ROOT / fixed["published_v2"]["run"]).spec
    tables = [table["name"] for table in fixed["tables"]]
    by_table = predictions(fixed, spec)
    second = {name: predict(v2, rates=rates_of(v2, name)) for name in tables}
    parts = (
        of_v3(fixed, spec, by_table),
        _v2(fixed, by_table, second),
        _longer(fixed["published_longer"], tables),
        _without_kernels(),
        _method(),
        _fixed(fixed, by_table),
    )
    return "\n\n".join(parts) + "\n"


def predictions(fixed: Mapping[str, Any], spec: Spec) -> dict[str, Prediction]:
    """Predict DeepSeek-V3 with each table of rates."""
    return {table["name"]: predict(spec, rates=rates_of(spec, table["name"])) for table in fixed["tables"]}


def of_v3(fixed: Mapping[str, Any], spec: Spec, found: Mapping[str, Prediction]) -> str:
    """The sections on DeepSeek-V3, at the beginning of the page."""
    calibrated = found[fixed["tables"][-1]["name"]]
    times = _head(fixed), _step(fixed, found), _classes(fixed, spec)
    return "\n\n".join((*times, _flops(fixed, found), _memory(fixed, calibrated), _bytes(fixed, calibrated)))


def _flow(*words: str) -> str:
    """A paragraph, wrapped to 118 columns."""
    return fill(" ".join(words), 118, break_long_words=False, break_on_hyphens=False)


def _item(*words: str) -> str:
    return fill(" ".join(words), 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def rows_of(fixed: Mapping[str, Any], prediction: Prediction) -> dict[str, float]:
    """The compared numbers: the step, and the rows of the fixed rank."""
    step = prediction.step
    return {"seconds": step.seconds} | {
        row: getattr(step.ranks[fixed["rank"]], row) for row in NAMES if row != "seconds"
    }


HEAD = """# Predictions beside DeepSeek's published runs

This page shows how near `dsc plan` comes to published steps of DeepSeek-V3 and V2, so that you can judge its
predictions. [published-runs.md](published-runs.md) does the same for runs of others. No rate is fitted to a whole
step. Two rate tables ([rates.md](rates.md)) are compared:
"""


def _head(fixed: Mapping[str, Any]) -> str:
    tables = (_item(f"- **{t['title']}**: `{t['name']}`, {t['why']}.") for t in fixed["tables"])
    return "\n".join(
        (HEAD, *tables, "", "`python -m benchmarks.predictions` writes this page; a test keeps it current.")
    )


def _fixed(fixed: Mapping[str, Any], found: Mapping[str, Prediction]) -> str:
    """The section on values that were set before any result was compared, and on changes of the program after that."""
    stages = next(iter(found.values())).stages
    agrees = [list(row.layers) for row in stages] == fixed["layers"]
    return "\n".join(
        (
            "## What was fixed before the comparison\n",
            _item(
                f"- **Layers of the stages**: {'; '.join(ranges(row.layers) for row in stages)}.",
                f"{fixed['layers_why'][0].upper()}{fixed['layers_why'][1:]}.",
                "" if agrees else "**They are no longer the ones that were fixed.**",
            ),
            _item(f"- **Rank**: {fixed['rank']}; {fixed['rank_why']}"),
            _item(
                f"- **Configurations tried**: {fixed['configurations_tried']}, all with the published answer in sight.",
                "Layers and tables stayed the same; the program changed, for every run, with a reason of its own each",
                "time. [predictions.json](../benchmarks/predictions.json) lists the changes and what each moved.",
            ),
        )
    )


def _step(fixed: Mapping[str, Any], found: Mapping[str, Prediction]) -> str:
    published = fixed["published"]
    titles = [table["title"] for table in fixed["tables"]]
    rows = [
        "## DeepSeek-V3: a step of 15,360 × 4,096 tokens on 2,048 H800\n",
        f"Published: {published['source']}. Seconds.\n",
        "| | published | " + " | ".join(f"{title} | off | goal" for title in titles) + " |",
        "|---|--:|" + "--:|--:|:--|" * len(titles),
    ]
    values = [rows_of(fixed, found[table["name"]]) for table in fixed["tables"]]
    for row, name in NAMES.items():
        cells = [f"{published[row]:g}"]
        for table, value in zip(fixed["tables"], values, strict=True):
            off = value[row] / published[row] - 1
            goal = table["within"].get(row)
            verdict = f"within {goal:.0%}: {'met' if abs(off) <= goal else '**missed**'}" if goal else ""
            cells += [f"{value[row]:.2f}", f"{off:+.1%}", verdict]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    between = []
    for table in fixed["tables"]:
        interval = found[table["name"]].step.interval
        assert interval is not None
        inside = "in it" if interval.low_s <= published["seconds"] <= interval.high_s else "**outside of it**"
        between.append(f"{interval.low_s:.1f} to {interval.high_s:.1f} s ({inside})")
    rows.append(f"\nThe intervals that `dsc plan` prints: {', and '.join(between)}.")
    return "\n".join(rows)


def _classes(fixed: Mapping[str, Any], spec: Spec) -> str:
    names = [table["name"] for table in fixed["tables"]]
    of_layer = {name: layer_classes(spec, name) for name in names}
    rows = [
        "## One MoE layer, by kernel class\n",
        _flow(
            "Milliseconds of a micro-batch of 4,096 tokens, forward and backward, beside the public profile",
            "(github.com/deepseek-ai/profile-data) that the calibrated table takes its factors from.",
        ),
        "",
        "| | profile | " + " | ".join(f"{table['title']} | off" for table in fixed["tables"]) + " |",
        "|---|--:|" + "--:|--:|" * len(names),
    ]
    for title, kinds, measured in TRACE:
        cells = []
        for name in names:
            listed = {kind for _, classes, _ in TRACE for kind in classes}
            chosen = kinds or tuple(kind for kind in of_layer[name] if kind not in (*listed, "launch"))
            value = sum(of_layer[name].get(kind, 0.0) for kind in chosen) * 1e3
            cells += [f"{value:.2f}", f"{value / measured - 1:+.0%}"]
        rows.append(f"| {title} | {measured:.2f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def layer_classes(spec: Spec, table: str) -> dict[str, float]:
    """Seconds of one MoE layer by kernel class: a quarter of a stage with four layers."""
    plan, rates = make_plan(spec), rates_of(spec, table)
    seconds: dict[str, float] = defaultdict(float)
    for kind, value in class_seconds(plan.stages[1], plan.cuts, rates, balanced_rows(spec)).items():
        seconds[kind] += value / 4
    return seconds


def _flops(fixed: Mapping[str, Any], found: Mapping[str, Prediction]) -> str:
    published, last = fixed["published"], found[fixed["tables"][-1]["name"]]
    mfu = mfu_of(last.flops, _with_seconds(last, published["seconds"]), last.num_devices * 989e12)
    hours = published["device_hours_per_trillion_tokens"]
    rows = [
        "## FLOPs, MFU, hours\n",
        _flow(
            "FLOPs of training on one token: 3 · (2 · parameters of products + attention core), without embedding,",
            "gates and MTP. MFU is relative to the BF16 peak, 989 TFLOPS.",
        ),
        "",
        "| | published | dsc |",
        "|---|--:|--:|",
        f"| FLOPs of a token, causal | {count(published['flops_per_token']['causal'])} | {count(last.flops.causal)} |",
        f"| FLOPs of a token, full | {count(published['flops_per_token']['full'])} | {count(last.flops.full)} |",
        f"| MFU of the published step, causal | {published['mfu']['causal']:.2%} | {mfu.causal:.2%} |",
        f"| MFU of the published step, full | {published['mfu']['full']:.2%} | {mfu.full:.2%} |",
    ]
    for table in fixed["tables"]:
        prediction = found[table["name"]]
        assert prediction.mfu is not None
        rows += [
            f"| MFU predicted, {table['title']}, causal | {published['mfu']['causal']:.2%} | "
            f"{prediction.mfu.causal:.2%} |",
            f"| device-hours per trillion tokens, {table['title']} | {count(hours)} | "
            f"{count(prediction.device_hours_per_trillion_tokens)} |",
        ]
    return "\n".join(rows)


def _with_seconds(prediction: Prediction, seconds: float) -> StepPrediction:
    return replace(prediction.step, seconds=seconds)


def _memory(fixed: Mapping[str, Any], prediction: Prediction) -> str:
    rows = [
        "## Memory of the published set-up\n",
        _flow(
            f"GiB of a device at its peak. Of the {fixed['published']['capacity']} of a device,",
            f"{prediction.ranks[0].capacity_bytes / GIB:.1f} GiB can be used.",
            "Every rank fits." if prediction.fits else "**Not every rank fits.**",
        ),
        "",
        "| ranks | weights | gradients | optimizer | activations | buffers | peak | if all rows came to it |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    alike: dict[str, list[int]] = defaultdict(list)
    for rank in prediction.ranks:
        parts = (rank.weights, rank.gradients, rank.optimizer, rank.activations, rank.buffers, rank.peak_bytes)
        worst = f"{rank.worst_bytes / GIB:.1f}" if rank.worst_bytes else ""
        alike[" | ".join((*(f"{part / GIB:.2f}" for part in parts), worst))].append(rank.pp_rank)
    rows += [f"| {ranges(ranks_alike)} | {cells} |" for cells, ranks_alike in alike.items()]
    return "\n".join(rows)


def _bytes(fixed: Mapping[str, Any], prediction: Prediction) -> str:
    published, exchange = fixed["published"]["bytes"], prediction.exchange
    assert exchange is not None
    return f"""## Bytes of a token in a MoE layer

| | from the paper's numbers | dsc |
|---|--:|--:|
| dispatch, FP8 and its scales, each copy | {published["dispatch"]:,} | {exchange.dispatch_bytes:,.0f} |
| combine, BF16, each copy | {published["combine"]:,} | {exchange.combine_bytes:,.0f} |
| copies over the network, at most | {published["copies"]} | {exchange.copies} |"""


def _v2(fixed: Mapping[str, Any], first: Mapping[str, Prediction], second: Mapping[str, Prediction]) -> str:
    published = fixed["published_v2"]
    hours = published["device_hours_per_trillion_tokens"]
    rows = [
        "## DeepSeek-V2, the same model unchanged\n",
        _flow(
            f"Published: {hours:,} hours of H800 for a trillion tokens ({published['source']}),",
            f"{published['ratio_to_v3']:g}",
            "of DeepSeek-V3's. Devices, micro-batches, recomputation, split and the zero-bubble schedule are not",
            f"published; `{published['run']}` chooses them. These choices change the hours by more than 15%; the",
            "ratio to V3 varies less.",
        ),
        "",
        "| | published | " + " | ".join(table["title"] for table in fixed["tables"]) + " |",
        "|---|--:|" + "--:|" * len(fixed["tables"]),
    ]
    names = [table["name"] for table in fixed["tables"]]
    hours_of = [second[name].device_hours_per_trillion_tokens for name in names]
    ratios = [value / first[name].device_hours_per_trillion_tokens for name, value in zip(names, hours_of, strict=True)]
    rows.append(
        f"| device-hours per trillion tokens | {hours / 1e3:.1f}K | "
        + " | ".join(f"{value / 1e3:.1f}K ({value / hours - 1:+.0%})" for value in hours_of)
        + " |"
    )
    rows.append(f"| of V3's | {published['ratio_to_v3']:g} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    rows.append(f"| step | | {' | '.join(f'{second[name].step.seconds:.2f} s' for name in names)} |")
    return "\n".join(rows)


def _longer(published: Mapping[str, Any], tables: Sequence[str]) -> str:
    """The phases of context extension, and their total device hours."""
    run = ROOT / published["run"]
    rows = [
        "## DeepSeek-V3, the two phases of context extension\n",
        _flow(
            f"Published: {published['device_hours']:,} hours of H800 for both ({published['source']}). Devices,",
            f"degrees of parallelism and recomputation are not published; `{published['run']}` chooses them.",
        ),
        "",
        f"| hours of devices | devices | memory | {' | '.join(tables)} |",
        "|---|--:|---|" + "--:|" * len(tables),
    ]
    hours = dict.fromkeys(tables, 0.0)
    for phase in phases_in(run)[1:]:
        spec = resolve(run, phase).spec
        by_table = {name: predict(spec, rates=rates_of(spec, name)) for name in tables}
        hours = {name: hours[name] + by_table[name].device_hours for name in tables}
        first = by_table[tables[-1]]
        cells = " | ".join(f"{by_table[name].device_hours / 1e3:.1f}K" for name in tables)
        fits = "fits" if first.fits else f"{max(r.peak_bytes for r in first.ranks) / GIB:.0f} GiB, does not fit"
        rows.append(f"| {phase.partition('.')[2]} | {first.num_devices:,} | {fits} | {cells} |")
    off = (f"{total / 1e3:.1f}K ({total / published['device_hours'] - 1:+.0%})" for total in hours.values())
    rows.append(f"| both | | | {' | '.join(off)} |")
    return "\n".join(rows)


def _without_kernels() -> str:
    """Steps of the newer models with kernels, and on torch for the ops that `kernels` names."""
    rows = [
        "## What kernels save\n",
        _flow(
            "A step with the kernels of the build, and with `kernels { KEY = torch }`, priced by what torch does",
            "([kernels.md](kernels.md#what-runs-on-torch)). *Of the compute*: the share that torch takes then.",
        ),
        "",
        "| run | key | with kernels | on torch | of the compute | temporary tensors |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, key in WITHOUT_KERNELS:
        with_kernels = predict(resolve(ROOT / "specs" / name).spec)
        on_torch = predict(resolve(ROOT / "specs" / name, overrides=[f"kernels.{key}=torch"]).spec)
        share = next(share for share in on_torch.torch if share.key == key)
        steps = " | ".join(f"{prediction.step.seconds:,.4g} s" for prediction in (with_kernels, on_torch))
        temporary = f"{share.temporary_bytes / GIB:.1f} GiB"
        rows.append(f"| {name.replace('.dsc', '')} | `{key}` | {steps} | {share.share:.0%} | {temporary} |")
    return "\n".join(rows)


def _method() -> str:
    steps = (
        "1. The op rules give the FLOPs and bytes of every kernel; the rate table gives its rate, by class, dtype and"
        " shape ([rates.md](rates.md)).",
        "2. Each action and each pair runs on a compute lane and a communication lane, in the order that `dsc compile`"
        " emits. It ends when the later lane ends.",
        "3. The schedule is run at these times. The bubble is the rest of the time until the last rank ends.",
        "4. After the schedule, gradients are summed over their holders, clipped and applied; weights are gathered.",
        "5. All of it takes as much longer as the slowest device ([scale.md](scale.md)).",
        f"6. The interval has a confidence of {CONFIDENCE:.0%} ([rates.md](rates.md#how-sure-a-step-is)).",
    )
    wrapped = (fill(step, 118, subsequent_indent="   ", break_on_hyphens=False) for step in steps)
    return "\n".join(("## How it is computed\n", *wrapped))


if __name__ == "__main__":
    sys.exit(main())

"""Training in FP8 blocks: a step equals the float64 step up to its roundings.

The emitted program runs as it is, and in float64 with independent roundings (wide_fp8.py). Without rounding, its
gradients equal those of a float64 program, which other tests compare with autograd: so each product reads the right
operands. With rounding to nearest, it is the FP8 run up to errors of FP32 sums. Random rounding shows how far roundings
in these places move each gradient. Every token goes to every expert, since rounding would decide near ties differently.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import BUILT_IN, Batch, Dense, HeadDim, Lora, Mla, Rope, Spec
from dsl.schema.run import Fusion
from runtime.build.build import Build
from runtime.comm.connect import Endpoint
from runtime.launch.heartbeat import Board
from runtime.step.trainer import ON_CPU, Trainer
from tests.compiler.model.segments.rounding import SPREADS, spread
from tests.runtime.step.samples import RandomSamples, steady_weight
from tests.runtime.step.specs import EVERYTHING, MOE, YARN, gqa, model, spec
from tests.runtime.step.wide_fp8 import Rounding, Wide

SAMPLES = 5
SEQUENCE = 70  # 2 sequences have 140 rows: one whole tile of columns, and a partial one
PUBLISHED = "as published"  # attention's output kept in E5M6
RECOMPUTE = {"nothing": (), PUBLISHED: ("rmsnorm", "mla_up", "swiglu"), "whole": ("attention", "dense", "experts")}
# Widths are multiples of 16, and only some of 128, so that rows end in partial tiles.
EVERYONE = MOE.model_copy(update={"experts": 4, "top_k": 4, "groups": 1, "top_groups": 1, "inner": 80})
LATENT = Mla(heads=2, query_rank=32, kv_rank=16, head_dim=HeadDim(nope=16, rope=8, value=72), rope=Rope(theta=100.0))
QUERIES = gqa(qk_norm="head").model_copy(update={"heads": 4, "kv_heads": 2, "head_dim": 36})
ATTENTION = {
    "mla": LATENT,
    "gqa": QUERIES,
    "mla, yarn": LATENT.model_copy(update={"rope": Rope(theta=100.0, scaling=YARN)}),
    "gqa, everything": EVERYTHING.model_copy(update={"head_dim": 36}),
}


def chosen(attention: str = "mla", precision: str = "fp8_block", recompute: str = "nothing") -> Spec:
    """One rank, two micro-batches, a dense and a MoE layer, and MTP."""
    small_model = model(ATTENTION[attention], Dense(inner=176), EVERYONE, mtp=True)
    layers = (small_model.layers[0], small_model.layers[1].model_copy(update={"last": 1}))
    base = spec(1, 1, 1, 2)
    train = base.train.model_copy(update={"sequence": SEQUENCE, "batch": Batch(start=4, end=4)})
    options = {"attention_output": "e5m6"} if recompute == PUBLISHED else {}
    return base.model_copy(
        update={
            "model": small_model.model_copy(update={"hidden": 144, "layers": layers}),
            "precision": BUILT_IN[precision].model_copy(update=options),
            "recompute": RECOMPUTE[recompute],
            "train": train.model_copy(update={"tokens": 5 * 4 * SEQUENCE}),
        }
    )


def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """A weight representable in BF16."""
    return torch.from_numpy(steady_weight(name, shape)).to(torch.bfloat16)


def step(
    folder: Path, how: Rounding | None, rank: int = 0, board: Board | None = None, endpoint: Endpoint = ON_CPU
) -> dict[str, Tensor]:
    """Gradients and losses of the first step of a build on a rank: as it runs, or in float64 with one kind of
    rounding."""
    build = Build.open(folder)
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
    trainer = Trainer(build, rank, samples, samples, board or Board(1).bind(0), endpoint)
    for bucket in trainer.state.all_buckets:
        for entry in bucket.entries:
            bucket.set_weight(entry, value_of(entry.name, entry.shape))
    for name, bias in trainer.state.biases.items():
        bias.copy_(value_of(name, tuple(bias.shape)))
    gradients = trainer.state.gradients
    package = f"dsc_build_{build.digest[:16]}"
    segments = [vars(module) for name, module in sys.modules.items() if name.startswith(f"{package}.segments.")]
    before = [dict(namespace) for namespace in segments]
    if how is not None:
        gradients = _in_float64(trainer, Wide(how))
        for namespace in segments:
            Wide(how).put(namespace)
    sums = trainer.accumulate()
    for namespace, names in zip(segments, before, strict=True):
        namespace.update(names)
    result = {name: value.clone() for name, value in vars(gradients).items()}
    return result | {"losses": torch.stack([sums["loss"], sums["mtp_loss"]])}


def _in_float64(trainer: Trainer, wide: Wide) -> SimpleNamespace:
    """Give a trainer float64 parameters and gradients. Returns the gradients, which it adds to."""
    parameters = {
        name: p.double() if p.is_floating_point() else p for name, p in vars(trainer.state.parameters).items()
    }
    for entry in trainer.quantised:
        parameters |= wide.weights(entry.name, parameters[entry.name])
    trainer.quantised = ()
    tangents = trainer._tangents
    trainer._tangents = lambda counts: {name: tangent.double() for name, tangent in tangents(counts).items()}
    gradients = SimpleNamespace(**{k: torch.zeros_like(g).double() for k, g in vars(trainer.state.gradients).items()})
    trainer.executor.parameters, trainer.executor.gradients = SimpleNamespace(**parameters), gradients
    return gradients


@dataclass(frozen=True)
class Roundings:
    """A float64 step without rounding, with random rounding, and with rounding to nearest."""

    exact: dict[str, Tensor]
    random: list[dict[str, Tensor]]
    nearest: dict[str, Tensor]

    @staticmethod
    def of(folder: Path, exact: dict[str, Tensor] | None = None) -> Roundings:
        """The steps of a build with unfused ops."""
        random = [step(folder, torch.Generator().manual_seed(seed)) for seed in range(SAMPLES)]
        return Roundings(exact or step(folder, False), random, step(folder, True))

    def hold(self, found: dict[str, Tensor]) -> None:
        """Assert that errors of an FP8 run are like those of random rounding, and that its tensors are near those of
        rounding to nearest: sums in another order change the rounding of some numbers, and what depends on them.

        Runs with independent roundings would differ by about 1.2 times the error. A small tensor may differ by
        chance, so only the median tensor must be within half the error.
        """
        apart = []
        for name, tensor in found.items():
            value = self.exact[name]
            size = spread([sample[name] for sample in self.random], value)
            error = float((tensor.double() - value).norm())
            assert error <= SPREADS * size, f"{name}: off by {error:.3g}, roundings alone {size:.3g}"
            if value.numel() >= 64:
                assert error >= size / 3, f"{name}: off by {error:.3g} only, roundings {size:.3g}"
                away = float((tensor.double() - self.nearest[name]).norm())
                assert away <= size * 3 / 4, f"{name}: {away:.3g} from nearest roundings, roundings {size:.3g}"
                apart.append(away / size)
        assert median(apart) <= 1 / 2


def built(folder: Path, of: Spec, segments: Segments) -> Path:
    write_build(folder, compile_spec(of, segments=segments).files)
    return folder


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of each tensor."""
    assert found.keys() == wanted.keys()
    pairs = ((name, found[name].double(), tensor.double()) for name, tensor in wanted.items())
    return {name: float((tensor - expected).norm() / expected.norm()) for name, tensor, expected in pairs}


@pytest.mark.parametrize(
    ("attention", "recompute"),
    [
        ("mla", PUBLISHED),
        ("mla", "nothing"),
        ("mla", "whole"),
        ("gqa", "nothing"),
        ("gqa", "whole"),
        ("mla, yarn", PUBLISHED),
        ("gqa, everything", "nothing"),
    ],
)
def test_a_step_differs_from_fp64_by_its_roundings(
    tmp_path: Path, segments: Segments, attention: str, recompute: str
) -> None:
    hold_to_roundings(tmp_path, segments, chosen(attention, recompute=recompute), chosen(attention, "fp64"))


@pytest.mark.parametrize("recompute", ["nothing", PUBLISHED])
def test_adapters_beside_products_in_eight_bits(tmp_path: Path, segments: Segments, recompute: str) -> None:
    """Products of frozen weights are quantised as usual, those of adapters are not."""
    lora = Lora(rank=4, alpha=6.0, on=("q_down", "q_up", "kv_up", "out", "up", "down", "projection"))
    narrow, wide = chosen(recompute=recompute), chosen(precision="fp64")
    hold_to_roundings(tmp_path, segments, *(variant.model_copy(update={"adapter": lora}) for variant in (narrow, wide)))


def hold_to_roundings(tmp_path: Path, segments: Segments, of: Spec, exactly: Spec) -> None:
    """Assert that the errors of a spec's step are those of its roundings. `exactly`: the spec in FP64."""
    apart = of.model_copy(update={"unfused": get_args(Fusion)})  # each rounding is between ops
    tensors = step(built(tmp_path / "fused", of, segments), None)
    folder = built(tmp_path / "apart", apart, segments)
    assert max(off(step(folder, None), tensors).values()) == 0.0, "a fused op rounds where its parts do"
    exact = step(folder, False)
    wide = step(built(tmp_path / "wide", exactly, segments), None)
    assert max(off(exact, wide).values()) < 1e-6  # losses are scaled by constants of FP32
    Roundings.of(folder, exact).hold(tensors)

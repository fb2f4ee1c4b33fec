"""Training with custom layers against a plain model that calls the modules, under autograd, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from compiler.emit.segment_cache import Segments
from compiler.model.modules.source import ModuleFiles
from compiler.plan.spec_files import SpecFiles
from dsl.schema import Custom, CustomAttention, LayerRange, Model, Spec
from tests.compiler.model.modules import layers
from tests.reference.attention import norm, rmsnorm
from tests.reference.model import Reference
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check, reference_of

FOLDER = Path(layers.__file__).parent
# The layers of a model of four: dense, one of each role, and one of both.
PARTS: tuple[tuple[str | None, str | None], ...] = (
    (None, None),
    (None, "Geglu"),
    ("GatedAttention", None),
    ("Convolution", "Shared"),
)


class Own(nn.Module):
    """A module between a norm and the residual stream."""

    def __init__(self, name: str, hidden: int) -> None:
        super().__init__()
        self.norm, self.module = norm(hidden), getattr(layers, name)(hidden).double()
        self.is_ffn = name in layers.FFNS

    def forward(self, h_BSD: Tensor, tokens_BS: Tensor | None = None) -> Tensor | tuple[Tensor, None]:
        """h_BSD -> the update that is added to it."""
        y_BSD: Tensor = self.module(rmsnorm(h_BSD, self.norm, 1e-6))
        return (y_BSD, None) if self.is_ffn else y_BSD


def with_modules(plain: Spec) -> Spec:
    """A spec with the layers of `PARTS`."""
    dense = plain.model.layers[0].ffn
    spans = tuple(
        LayerRange(
            first=layer,
            last=layer,
            ffn=Custom(module=f"layers.py:{ffn}") if ffn else dense,
            attention=CustomAttention(module=f"layers.py:{attention}") if attention else None,
        )
        for layer, (attention, ffn) in enumerate(PARTS)
    )
    model = plain.model.model_copy(update={"layers": spans})
    return plain.model_copy(update={"model": model}).with_files(SpecFiles(modules=ModuleFiles(FOLDER)))


def reference_with_modules(model: Model, sequence: int) -> Reference:
    """The reference of the model without modules, with the modules of `PARTS` inserted."""
    dense = model.layers[0].ffn
    spans = tuple(LayerRange(first=layer, last=layer, ffn=dense) for layer in range(len(PARTS)))
    reference = reference_of(model.model_copy(update={"layers": spans}), sequence)
    for block, (attention, ffn) in zip(reference.layers, PARTS, strict=True):
        if attention:
            block.attention = Own(attention, model.hidden)
        if ffn:
            block.ffn = Own(ffn, model.hidden)
    return reference


@pytest.mark.parametrize(
    ("schedule", "pp", "dp", "zero", "recompute"),
    [
        ("1f1b", 1, 1, 0, ()),
        ("dualpipe", 2, 1, 0, ()),
        ("zb1p", 2, 2, 1, ("rmsnorm", "attention", "dense")),
        ("1f1b", 2, 2, 3, ()),
    ],
)
def test_training_equals_autograd(
    tmp_path: Path, segments: Segments, schedule: str, pp: int, dp: int, zero: int, recompute: tuple[str, ...]
) -> None:
    plain = spec(pp, 1, dp, 2 * pp, STEPS, zero, "llama", schedule)
    chosen = with_modules(plain.model_copy(update={"recompute": recompute}))
    check(tmp_path, segments, {"only": chosen}, pp * dp, make=reference_with_modules)

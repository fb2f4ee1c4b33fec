"""Separate documents: changing one changes no bit of the losses of another, nor of the gradients of these losses.

With experts, a changed document is routed differently. Then products of experts have other rows, and gradients
of weights are sums in another order: they agree to the rounding of float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsl.schema import AnyAttention, Balance, Dense, Moe, Phase, Spec
from tests.compiler.model.segments.model import run
from tests.compiler.model.segments.specs import DENSE, deltanet, gqa, mla, moe, spec
from tests.reference.cases import trained_like
from tests.reference.config import Config

SEQUENCE = 12
UNBALANCED = moe(balance=Balance(bias_rate=(Phase(value=0.001),)))  # the loss of a sequence is of all its documents
LENGTHS = (4, 1, 7)


def of_document(model_spec: Spec, parameters: dict[str, Tensor], tokens_BZ: Tensor, only: int) -> tuple[Tensor, Tensor]:
    """Both losses and all gradients, flattened, of a step with the targets of only one document."""
    number_S = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    starts_S = torch.tensor([sum(LENGTHS[:n]) for n in number_S.tolist()], dtype=torch.int32)
    position_S = torch.arange(SEQUENCE)
    end = sum(LENGTHS[: only + 1])
    rows = len(tokens_BZ)

    def targets(ahead: int) -> Tensor:
        is_target = (number_S == only) & (position_S + ahead < end)
        return tokens_BZ[:, ahead : SEQUENCE + ahead].masked_fill(~is_target, -1).flatten()

    data = {
        "tokens": tokens_BZ[:, :SEQUENCE].flatten(),
        "targets": targets(1),
        "mtp_tokens": tokens_BZ[:, 1 : SEQUENCE + 1].flatten(),
        "mtp_targets": targets(2),
        "starts": starts_S.repeat(rows),
    }
    constants = {"loss": 0.1, "mtp": 0.03} | {f"sequence_loss L{i}": 0.0 for i in range(model_spec.model.num_layers)}
    values, gradients = run(model_spec, parameters, [data], constants)
    losses = [values[0][name].flatten() for name in ("loss", "mtp_loss") if name in values[0]]
    return torch.cat(losses), torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@pytest.mark.parametrize(
    ("ffn", "attention"),
    [
        (DENSE, mla()),
        (UNBALANCED, mla()),
        (DENSE, gqa(output_gate=True)),
        (UNBALANCED, gqa(window=3, sinks=True)),
        (DENSE, deltanet("channel")),
        (DENSE, deltanet("head")),
    ],
    ids=["latent", "latent, experts", "grouped", "window, experts", "channels", "heads"],
)
def test_a_changed_document_changes_no_bit_of_another(ffn: Dense | Moe, attention: AnyAttention) -> None:
    model_spec = spec(layers=(DENSE, ffn), attention=attention, sequence=SEQUENCE)
    apart = model_spec.model_copy(update={"data": model_spec.data.model_copy(update={"documents": "masked"})})
    parameters = trained_like(
        Config.from_plan(model_spec.model.model_dump() | {"sequence": SEQUENCE})
    ).logical_parameters()
    generator = torch.Generator().manual_seed(7)
    tokens_BZ = torch.randint(model_spec.model.vocab, (2, SEQUENCE + 2), generator=generator)
    numbers = range(len(LENGTHS))
    before = [of_document(apart, parameters, tokens_BZ, only) for only in numbers]
    for changed in numbers:
        begin = sum(LENGTHS[:changed])
        place = slice(begin, begin + LENGTHS[changed])
        other_BZ = tokens_BZ.clone()
        other_BZ[:, place] += torch.randint(1, model_spec.model.vocab, other_BZ[:, place].shape, generator=generator)
        other_BZ %= model_spec.model.vocab
        for only in numbers:
            losses, gradients = of_document(apart, parameters, other_BZ, only)
            if changed == only:
                assert LENGTHS[only] == 1 or not torch.equal(losses, before[only][0]), "one token predicts nothing"
                continue
            assert torch.equal(losses, before[only][0]), (changed, only)
            tolerance = 1e-15 if ffn is UNBALANCED else 0
            torch.testing.assert_close(gradients, before[only][1], rtol=0, atol=tolerance)

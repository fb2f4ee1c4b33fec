"""Every mesh of up to eight ranks against plain autograd: in float64, in real processes, as in test_differential.py.

The model has every part that an axis shards: latent attention, a dense layer, shared and routed experts with both kinds
of balancing, a balancing loss of whole sequences, and MTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from dsl.facts.schedules import FACTS
from dsl.schema import Dense, HeadDim, Mla, Model, Rope, ScheduleBlock, Spec
from tests.runtime.step.specs import MOE, model, spec
from tests.runtime.step.test_differential import STEPS, check

WORLD, SEQUENCE, VOCAB = 8, 16, 64
SIZES = [1, 2, 4, 8]
MESHES = [mesh for mesh in product(SIZES, repeat=4) if mesh[0] * mesh[1] * mesh[2] * mesh[3] <= WORLD]


def schedules(pp: int) -> list[str]:
    """The schedules that a mesh may have."""
    if pp == 1:
        return ["1f1b"]
    stages = num_layers(pp) + 1
    return [name for name, facts in FACTS.items() if facts.stages_per_rank() * pp <= stages]


def num_layers(pp: int) -> int:
    return 8 if pp > 2 else 4


def wide(num_layers: int) -> Model:
    """A model with `num_layers` layers and sizes that eight ranks divide on every axis."""
    attention = Mla(
        heads=8, query_rank=12, kv_rank=9, head_dim=HeadDim(nope=6, rope=4, value=5), rope=Rope(theta=100.0)
    )
    of_experts = MOE.model_copy(update={"inner": 16})
    base = model(attention, Dense(inner=24), of_experts, mtp=True)
    layers = base.layers[0], base.layers[1].model_copy(update={"last": num_layers - 1})
    return base.model_copy(update={"vocab": VOCAB, "layers": layers})


def meshes_of(pp: int, dp: int, cp: int, tp: int) -> Iterator[tuple[str, Spec]]:
    """A spec for each way to spread experts and state over a mesh. Schedules and recomputed layers alternate, so that
    each is combined with each axis."""
    columns, turn = dp * cp * tp, SIZES.index(pp) + SIZES.index(dp) + SIZES.index(cp) + SIZES.index(tp)
    for ep, etp, zero in product(SIZES, SIZES, range(4)):
        if columns % (ep * etp):
            continue
        turn += 1
        names = schedules(pp)
        shape = {"tensor": tp, "context": cp, "expert_tensor": etp, "sequence": SEQUENCE, "vocab": VOCAB}
        base = spec(pp, ep, dp, 2 * pp, STEPS, zero, **shape)  # type: ignore[arg-type]
        changed = {"model": wide(num_layers(pp)), "schedule": ScheduleBlock(name=names[turn % len(names)])}
        changed |= {"recompute": ("layer",)} if turn % 3 == 0 else {}
        yield f"ep{ep}_etp{etp}_zero{zero}", base.model_copy(update=changed)


@pytest.mark.parametrize(("pp", "dp", "cp", "tp"), MESHES)
def test_one_way_of_each_mesh(tmp_path: Path, segments: Segments, pp: int, dp: int, cp: int, tp: int) -> None:
    """Each mesh is tested with another way to spread experts and state."""
    specs = dict(meshes_of(pp, dp, cp, tp))
    chosen = [*specs][MESHES.index((pp, dp, cp, tp)) * 7 % len(specs)]
    check(tmp_path, segments, {chosen: specs[chosen]}, pp * dp * cp * tp)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("pp", "dp", "cp", "tp"), MESHES)
def test_every_way_of_each_mesh(
    tmp_path: Path, segments: Segments, pp: int, dp: int, cp: int, tp: int, zero: int
) -> None:
    specs = {name: chosen for name, chosen in meshes_of(pp, dp, cp, tp) if chosen.parallel.zero == zero}
    check(tmp_path, segments, specs, pp * dp * cp * tp)

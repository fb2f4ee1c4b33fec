"""The differences of two specs: values, and facts that follow from them (parameters, memory, stages, schedule).

Names of runs, models, clusters, precisions and devices are not compared, nor comments, order and notation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

from compiler.ir import Use
from compiler.machine.rates import RateTable
from compiler.plan.blocks import cut_model
from compiler.plan.layer_runs import stage_placement_of_spec
from compiler.plan.spec_files import rate_table_of, schedule_of_file
from compiler.plan.stages import build_stages
from compiler.schedule import SCHEDULES, schedule_of_block
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from dsl.closed_forms import ramp
from dsl.closed_forms.counts import parameters
from dsl.closed_forms.memory import lower_bound
from dsl.leaves import leaves, origin_of
from dsl.load import ResolvedSpec
from dsl.schema import Dense, Moe, Spec

MAX_SIMULATED = 2**15  # micro-batches · stages, which take a second


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value as written in both specs; None if a spec does not have it. Layers are named as a range."""

    path: str  # parallel.pipeline, model.layers.3..60.ffn.experts
    before: str | None
    after: str | None
    derived: bool = False  # not written in a spec, but derived from other values


@dataclass(frozen=True, slots=True)
class Fact:
    """A number or a name that follows from the values of a spec; None if unknown."""

    name: str  # parameters.total
    before: int | float | str | None
    after: int | float | str | None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class LayersMove:
    """Layers `first` to `last`, which move to another pipeline stage."""

    first: int
    last: int
    before: int
    after: int


@dataclass(frozen=True)
class SpecDifference:
    values: tuple[ValueChange, ...]
    facts: tuple[Fact, ...]  # only those that differ
    moves: tuple[LayersMove, ...]

    @property
    def is_none(self) -> bool:
        """Whether the specs are equal. Facts follow from values, so only values are compared."""
        return not self.values


def difference(before: ResolvedSpec, after: ResolvedSpec) -> SpecDifference:
    """Return all differences. Pure and torch-free; the files that the specs name must be loaded."""
    values = (*_changes(before, after), *_layer_changes(before.spec, after.spec))
    tables = rate_table_of(before.spec), rate_table_of(after.spec)
    orders = schedule_of_file(before.spec), schedule_of_file(after.spec)
    if tables[0] is not None and tables[1] is not None and tables[0] != tables[1]:
        values += (ValueChange("cluster.rates.rows", _rows(tables[0]), _rows(tables[1]), False),)
    if orders[0] is not None and orders[1] is not None and orders[0].actions != orders[1].actions:
        values += (ValueChange("schedule.actions", _extent(orders[0]), _extent(orders[1]), False),)
    if not values:
        return SpecDifference((), (), ())
    facts = zip(_facts(before.spec), _facts(after.spec), strict=True)
    return SpecDifference(
        values=tuple(sorted(values, key=lambda change: _block_of(change.path))),
        facts=tuple(Fact(name, old, new, unit) for (name, old, unit), (_, new, _) in facts if old != new),
        moves=tuple(_moves(_stage_of_layers(before.spec), _stage_of_layers(after.spec))),
    )


def _rows(table: RateTable) -> str:
    return f"{table.name}, {len(table.rows):,} rows"


def _extent(schedule: Schedule) -> str:
    return f"{schedule.name}, {sum(map(len, schedule.actions)):,} steps"


# ---------------------------------------------------------------- values


def _block_of(path: str) -> int:
    """Return the position of a path's block in the schema."""
    return tuple(Spec.model_fields).index(path.partition(".")[0])


def _changes(before: ResolvedSpec, after: ResolvedSpec) -> Iterator[ValueChange]:
    old, new = _texts(before.spec), _texts(after.spec)
    paths = list(old)
    for previous, path in zip((None, *new), new, strict=False):  # a new value is placed as in its spec
        if path not in old:
            paths.insert(paths.index(previous) + 1 if previous else 0, path)
    for path in paths:
        if old.get(path) != new.get(path):
            kinds = {origin_of(path, resolved.spec, resolved.origins).kind for resolved in (before, after)}
            derived = "derived" in kinds and kinds <= {"derived", "default"}
            yield ValueChange(path, old.get(path), new.get(path), derived)


def _texts(spec: Spec) -> dict[str, str]:
    """Return the text of each value by path, without names and values of layers."""
    value_leaves = (leaf for leaf in leaves(spec) if not leaf.is_name)
    return {leaf.path: leaf.text for leaf in value_leaves if not leaf.path.startswith("model.layers.")}


def _layer_changes(before: Spec, after: Spec) -> Iterator[ValueChange]:
    """Yield the changes of layers. Equal changes of consecutive layers are merged, however ranges are written."""
    old, new = _layers(before), _layers(after)
    count = max(len(old), len(new))
    changes = [tuple(_layer_change(old.get(layer), new.get(layer))) for layer in range(count)]
    for change, run in groupby(range(count), key=lambda layer: changes[layer]):
        layers = list(run)
        span = f"{layers[0]}..{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
        yield from (ValueChange(f"model.layers.{span}{key}", was, is_now) for key, was, is_now in change)


def _layers(spec: Spec) -> dict[int, dict[str, str]]:
    """Return values of each layer's feed-forward part, and of its attention if the layer sets one."""
    ranges: list[dict[str, str]] = [{} for _ in spec.model.layers]
    for leaf in leaves(spec):
        _, _, inner_path = leaf.path.partition("model.layers.")
        index, _, key = inner_path.partition(".")
        if key:
            ranges[int(index)][key] = leaf.text
    return {layer: ranges[spec.model.range_of(layer)] for layer in range(spec.model.num_layers)}


def _layer_change(
    old: Mapping[str, str] | None, new: Mapping[str, str] | None
) -> Iterator[tuple[str, str | None, str | None]]:
    """Return (key, before, after) of a layer. A layer that is new, removed or of another kind is one change."""
    if old is None or new is None or old["ffn.kind"] != new["ffn.kind"]:
        key = "" if old is None or new is None else ".ffn"
        yield key, None if old is None else _summary(old), None if new is None else _summary(new)
        return
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            yield f".{key}", old.get(key), new.get(key)


def _summary(values: Mapping[str, str]) -> str:
    """Summarize a layer: `dense 18432`, `moe 256 x 2048`, `custom layers.py:Mixer`."""
    experts = f"{values['ffn.experts']} x " if "ffn.experts" in values else ""
    size = values["ffn.inner"] if "ffn.inner" in values else values["ffn.module"]
    return f"{values['ffn.kind']} {experts}{size}"


# ---------------------------------------------------------------- what follows


def _facts(spec: Spec) -> Iterator[tuple[str, int | float | str | None, str]]:
    """Yield (name, value, unit), with the same names for every spec."""
    counts, memory, growth = parameters(spec.model), lower_bound(spec), ramp.ramp_of_spec(spec)
    yield "parameters.total", counts.total, ""
    yield "parameters.active", counts.active, ""
    yield "parameters.mtp", counts.mtp, ""
    for name in ("total", "weights", "gradients", "optimizer", "activations"):
        yield f"memory.{name}", getattr(memory, name), "byte"
    micro_batches = spec.train.batch.end // (spec.parallel.data * spec.train.micro_batch)
    steps = growth.steps_for(spec.train.tokens)
    yield "layers.dense", sum(isinstance(spec.model.ffn(n), Dense) for n in range(spec.model.num_layers)), ""
    yield "layers.moe", sum(isinstance(spec.model.ffn(n), Moe) for n in range(spec.model.num_layers)), ""
    from_file = schedule_of_file(spec)
    yield "schedule.name", from_file.name if from_file else spec.schedule.name, ""
    yield "schedule.stages", _num_stages(spec), ""
    yield "schedule.micro_batches", micro_batches, ""
    yield "schedule.batch_sizes", len([size for size in growth.sizes if size.first_step < steps]), ""
    yield "schedule.steps", steps, ""
    yield "schedule.bubble", _bubble(spec, micro_batches), "share"


def _bubble(spec: Spec, micro_batches: int) -> float | None:
    """Return the idle share of pipeline ranks in a step in which F, I and W take equal times; None if unknown."""
    ranks = spec.parallel.pipeline
    name = spec.schedule.name
    from_file = schedule_of_file(spec)
    if (from_file is None and name not in SCHEDULES) or _num_stages(spec) * micro_batches > MAX_SIMULATED:
        return None
    timeline = simulate(from_file or schedule_of_block(spec.schedule, ranks, micro_batches), Costs())
    return round(float(sum(timeline.idle, Fraction(0)) / (timeline.makespan * ranks)), 6)


def _num_stages(spec: Spec) -> int:
    return stage_placement_of_spec(spec).num_stages(spec.parallel.pipeline)


def _stage_of_layers(spec: Spec) -> dict[int, int]:
    """Return the stage of each layer, as planned."""
    return {
        use.site.layer: stage.index
        for stage in build_stages(cut_model(spec), _num_stages(spec), stage_placement_of_spec(spec))
        for use in stage.steps
        if isinstance(use, Use) and use.site.layer is not None
    }


def _moves(old: Mapping[int, int], new: Mapping[int, int]) -> Iterator[LayersMove]:
    """Yield layers of both specs whose stage differs. Consecutive layers that move together are merged."""
    shared = [layer for layer in sorted(old) if layer in new]
    for (before, after), run in groupby(shared, key=lambda layer: (old[layer], new[layer])):
        layers = list(run)
        if before != after:
            yield LayersMove(layers[0], layers[-1], before, after)

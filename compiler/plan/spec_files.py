"""The files that a spec names: a schedule, an expert placement, a rate table, an initial checkpoint, custom modules and
rewards.

Their contents are part of the spec's value; for a checkpoint this is its digest, and for a module its graph.
`compiler/plan/read_files.py` reads them once, when a command reads the spec. They travel with the spec, and its users
ask for them here. A build is self-contained: it has copies of the files under fixed names, which its spec uses. A
checkpoint is not copied, and neither is the text of the data: the build has only the checkpoint's digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiler.ir.expert_placement import ExpertPlacement
    from compiler.ir.module import Module, SpecModules, WantedModule
    from compiler.machine.rates.table import RateTable
    from compiler.schedule.schedule import Schedule
    from dsl.schema import Spec  # imports pydantic
    from runtime.contract import Initial

# The names of the files in a build or run.
SCHEDULE, EXPERT_PLACEMENT, RATE_TABLE = "schedule.txt", "placement.json", "rates.json"
INITIAL = "initial.sha256"
REWARDS = "rewards"  # a folder


@dataclass(frozen=True)
class SpecFiles:
    """The files, read and checked against the spec. A rate table may be given even if the spec names none."""

    schedule: Schedule | None = None  # of `schedule { file = … }`
    expert_placement: ExpertPlacement | None = None  # of `parallel { placement = … }`
    rate_table: RateTable | None = None  # of `cluster { rates = … }`
    initial: Initial | None = None  # of `train { initial = … }`
    modules: SpecModules | None = None  # of `ffn custom { module = … }`, and of attention
    rewards: Mapping[str, str] | None = None  # of `rewards { NAME { file = … } }`: name → text


def files_of(spec: Spec) -> SpecFiles:
    """All files of a spec that were read."""
    files = spec.files
    return files if isinstance(files, SpecFiles) else SpecFiles()


def with_schedule(spec: Spec, schedule: Schedule) -> Spec:
    """The spec with the contents of its `schedule.file`."""
    return spec.with_files(replace(files_of(spec), schedule=schedule))


def with_expert_placement(spec: Spec, expert_placement: ExpertPlacement) -> Spec:
    """The spec with the contents of its `parallel.placement`."""
    return spec.with_files(replace(files_of(spec), expert_placement=expert_placement))


def with_rate_table(spec: Spec, rate_table: RateTable) -> Spec:
    """The spec with the contents of its `cluster.rates`, or with a table that replaces them."""
    return spec.with_files(replace(files_of(spec), rate_table=rate_table))


def schedule_of_file(spec: Spec) -> Schedule | None:
    """The schedule of the file that the spec names, which defers no more weight gradients than the spec allows; None if
    the spec names a schedule instead."""
    if spec.schedule.file is None:
        return None
    schedule = files_of(spec).schedule
    assert schedule is not None, "a spec that names a schedule file is read by compiler/plan/read_files.py"
    return schedule.deferring_at_most(spec.schedule.deferred)


def expert_placement_of(spec: Spec) -> ExpertPlacement | None:
    """The placement of experts that the spec names; None if experts are placed by their numbers."""
    if spec.parallel.placement is None:
        return None
    placement = files_of(spec).expert_placement
    assert placement is not None, "a spec that names a placement of experts is read by compiler/plan/read_files.py"
    return placement


def rate_table_of(spec: Spec) -> RateTable | None:
    """The rate table that the spec names or that was given instead; None if there is neither."""
    table = files_of(spec).rate_table
    assert table is not None or spec.cluster.rates is None, "a spec that names a rate table is read with it"
    return table


def initial_weights_of(spec: Spec) -> Initial | None:
    """The initial checkpoint of the spec; None if its weights are initialized at random."""
    initial = files_of(spec).initial
    assert initial is not None or spec.train.initial is None, "a spec that names a checkpoint is read with it"
    return initial


def modules_of(spec: Spec) -> dict[WantedModule, Module]:
    """The graphs of the modules that the spec names, at the sizes of the run."""
    modules = files_of(spec).modules
    assert modules is not None or not spec.model.customs, "a spec that names a module is read with it"
    if modules is None:
        return {}
    from compiler.model.layers.custom import wanted_modules  # imports all layers

    return {wanted: modules.module(wanted) for wanted in wanted_modules(spec).values()}


def reward_file(name: str) -> str:
    """The name of a reward's file in a build or run."""
    return f"{REWARDS}/{name}.py"


def reward_files_of(spec: Spec) -> dict[str, str]:
    """The texts of the reward files that the spec names, by their names in a build."""
    named = [reward.name for reward in spec.train.grpo.rewards if reward.file is not None] if spec.train.grpo else []
    rewards = files_of(spec).rewards
    assert rewards is not None or not named, "a spec that names files of rewards is read with them"
    return {reward_file(name): rewards[name] for name in named} if rewards else {}


def standing_alone(spec: Spec) -> Spec:
    """The spec of a build, which names the copies of its files."""
    keys = ("schedule", "file"), ("parallel", "placement"), ("cluster", "rates")
    for (block, key), name in zip(keys, (SCHEDULE, EXPERT_PLACEMENT, RATE_TABLE), strict=True):
        value = getattr(spec, block)
        if getattr(value, key) is not None:
            spec = spec.model_copy(update={block: value.model_copy(update={key: name})})
    if (grpo := spec.train.grpo) is None:
        return spec
    rewards = tuple(
        reward if reward.file is None else reward.model_copy(update={"file": reward_file(reward.name)})
        for reward in grpo.rewards
    )
    train = spec.train.model_copy(update={"grpo": grpo.model_copy(update={"rewards": rewards})})
    return spec.model_copy(update={"train": train})


def texts_of_files(spec: Spec) -> dict[str, str]:
    """The texts of a spec's files, by their names in a build."""
    schedule, expert_placement, table = schedule_of_file(spec), expert_placement_of(spec), rate_table_of(spec)
    initial = initial_weights_of(spec)
    return {
        **({SCHEDULE: schedule.to_text()} if schedule else {}),
        **({EXPERT_PLACEMENT: expert_placement.text} if expert_placement else {}),
        **({RATE_TABLE: table.to_json()} if table else {}),
        **({INITIAL: f"{initial.sha256}\n"} if initial else {}),
        **_texts_of_modules(spec),
        **reward_files_of(spec),
    }


def _texts_of_modules(spec: Spec) -> dict[str, str]:
    if not (traced := modules_of(spec)):
        return {}
    from compiler.model.modules.source import FILE, to_json

    return {FILE: to_json(traced.items())}

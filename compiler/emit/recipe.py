"""The parts of plan.json that depend only on the spec, in the form that the runtime reads
(runtime/contract/plan.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from compiler.ir.dtypes import TORCH_DTYPE
from compiler.plan.spec_files import initial_weights_of, reward_file
from dsl.closed_forms.memory import HOST_PART, HOST_SLOTS, DeviceBytes, average_dtype
from dsl.schema import (
    Grpo,
    Health,
    Lora,
    Model,
    Node,
    Phase,
    Precision,
    QuietField,
    Spec,
)
from dsl.schema.base import as_tree, is_left_out
from runtime import contract

QUIET = tuple(
    name for name, info in Model.model_fields.items() if QuietField() in info.metadata
)  # optional keys of a model


def precision(block: Precision) -> contract.PlannedPrecision:
    return contract.PlannedPrecision(
        parameter=TORCH_DTYPE[block.parameter],
        compute=TORCH_DTYPE[block.compute],
        linear=TORCH_DTYPE[block.linear],
        accumulate=TORCH_DTYPE[block.accumulate],
        gradients=TORCH_DTYPE[block.gradients],
        master=TORCH_DTYPE[block.master],
        moments=TORCH_DTYPE[block.moments],
        dispatch=TORCH_DTYPE[block.dispatch],
        combine=TORCH_DTYPE[block.combine],
    )


def model(block: Model) -> contract.PlannedModel:
    set_keys = [name for name in QUIET if not is_left_out(Model.model_fields[name], getattr(block, name))]
    return contract.PlannedModel(
        name=block.name,
        vocab=block.vocab,
        hidden=block.hidden,
        init_std=block.init_std,
        norm_eps=block.norm_eps,
        attention=_set_keys(block.attention),
        layers=tuple(_layers(block)),
        mtp=as_tree(block.mtp) if block.mtp else None,
        more={name: as_tree(getattr(block, name)) for name in set_keys} if set_keys else None,
    )


def _set_keys(block: Node) -> dict[str, Any]:
    """The keys of a block without optional ones that are not set, as in `spec.resolved`."""
    return {
        name: _set_keys(value) if isinstance(value, Node) else value
        for name, value in block
        if value is not None or type(block).model_fields[name].is_required()
    }


def _layers(block: Model) -> Iterator[contract.PlannedLayers]:
    """The ranges of equal layers. `max_nodes` is left out: it affects only where experts are placed, not any value, so
    a run can be resumed with another one."""
    for index, run in groupby(range(block.num_layers), key=block.range_of):
        layers, span = [*run], block.layers[index]
        ffn = {name: value for name, value in as_tree(span.ffn).items() if name != "max_nodes"}
        attention = _set_keys(span.attention) if span.attention is not None else None
        yield contract.PlannedLayers(layers[0], layers[-1], ffn, attention)


def train(spec: Spec) -> contract.TrainRecipe:
    block, average = spec.train, spec.train.ema
    batch, checkpoint, validate = block.batch, block.checkpoint, block.validate
    optimizer, *rest = block.optimizer.rows
    return contract.TrainRecipe(
        sequence=block.sequence,
        micro_batch=block.micro_batch,
        batch=contract.BatchGrowth(batch.start, batch.end, batch.over_tokens),
        tokens=block.tokens,
        optimizer=contract.OptimizerRecipe(
            kind=optimizer.kind,
            settings=optimizer.settings(),
            weight_decay=optimizer.weight_decay,
            clip=optimizer.clip,
            rest=contract.UpdateOfRest(rest[0].kind, rest[0].settings()) if rest else None,
            qk_clip=optimizer.qk_clip,
        ),
        rate=tuple(contract.RecipeRatePhase(p.shape, p.start, p.end, p.end_tokens) for p in block.rate),
        seed=block.seed,
        checkpoint=contract.Checkpoints(
            every=checkpoint.every,
            keep=checkpoint.keep,
            best=checkpoint.best,
            keep_every=checkpoint.keep_every,
            failure=checkpoint.failure,
            background=checkpoint.background,
            to=checkpoint.to,
        )
        if checkpoint
        else None,
        validate=contract.Validation(validate.every, validate.batches, validate.ema) if validate else None,
        ema=contract.EmaRecipe(average.decay, TORCH_DTYPE[average_dtype(spec.precision)]) if average else None,
        initial=initial_weights_of(spec),
        within=contract.PhaseSteps(**dict(block.within)) if block.within else None,
        health=_health(block.health) if block.health else None,
        grpo=_grpo(block.grpo) if block.grpo else None,
    )


def _grpo(block: Grpo) -> contract.GrpoRecipe:
    rewards = (
        contract.RewardRecipe(
            **dict(reward) | {"file": None if reward.file is None else reward_file(reward.name), "named": reward.file}
        )
        for reward in block.rewards
    )
    return contract.GrpoRecipe(**dict(block) | {"rewards": tuple(rewards)})


def _health(block: Health) -> contract.HealthRecipe:
    spike = contract.SpikeRecipe(**dict(block.spike)) if block.spike else None
    return contract.HealthRecipe(**dict(block) | {"spike": spike})


def adapter(block: Lora | None) -> contract.Adapter | None:
    return contract.Adapter(block.kind, block.rank, block.factor, block.on) if block else None


def cluster(spec: Spec) -> tuple[contract.NodeKind, ...]:
    """The nodes that a run is planned for, in rank order."""
    kinds = ((nodes, machine.devices, machine.device) for nodes, machine in spec.cluster.parts)
    return tuple(
        contract.NodeKind(
            nodes,
            devices,
            device.name,
            None if device.bf16 is None else device.sms,
            device.memory,
            device.reserved_bytes,
        )
        for nodes, devices, device in kinds
    )


def optimizer_state(spec: Spec) -> contract.OptimizerState:
    """The tensors that the optimizer of a run keeps, by its rows."""
    state, *rest = (
        tuple(
            contract.OptimizerTensor(tensor.name, TORCH_DTYPE[getattr(spec.precision, tensor.role)])
            for tensor in row.state
        )
        for row in spec.train.optimizer.rows
    )
    return contract.OptimizerState(state, spec.train.optimizer.unit, *rest)


def host(spec: Spec, memories: Iterable[DeviceBytes]) -> contract.Host:
    """The state in host memory. `memories`: the planned bytes of one device of each pipeline rank."""
    if not spec.offload and spec.train.ema is None:
        return contract.Host()
    host_bytes = tuple(memory.host for memory in memories) if spec.has_hosts else ()
    return contract.Host(spec.offload, HOST_PART, HOST_SLOTS, host_bytes)


def phases(phases: Iterable[Phase]) -> tuple[contract.PlannedPhase, ...]:
    return tuple(contract.PlannedPhase(phase.value, phase.until_tokens) for phase in phases)

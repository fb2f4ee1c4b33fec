"""What a build's plan takes from the spec alone, as the runtime reads it (runtime/contract/plan.py)."""

from __future__ import annotations

from collections.abc import Iterable

from compiler.dtypes import TORCH_DTYPE
from dsl.schema import Data, Model, Phase, Precision, Spec, Train
from runtime import contract


def data_request(spec: Spec) -> contract.DataRequest:
    """What preparing the data of a run takes, known before there is a plan."""
    return contract.DataRequest(data(spec.data), spec.model.vocab, spec.train.seed)


def precision(block: Precision) -> contract.Precision:
    return contract.Precision(
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


def model(block: Model) -> contract.Model:
    return contract.Model(
        name=block.name,
        vocab=block.vocab,
        hidden=block.hidden,
        init_std=block.init_std,
        norm_eps=block.norm_eps,
        attention=block.attention.model_dump(mode="json"),
        layers=tuple(contract.Layers(s.first, s.last, s.ffn.model_dump(mode="json")) for s in block.layers),
        mtp=block.mtp.model_dump(mode="json") if block.mtp else None,
    )


def train(block: Train) -> contract.Train:
    batch, optimizer, checkpoint, validate = block.batch, block.optimizer, block.checkpoint, block.validate
    return contract.Train(
        sequence=block.sequence,
        micro_batch=block.micro_batch,
        batch=contract.BatchGrowth(batch.start, batch.end, batch.over_tokens),
        tokens=block.tokens,
        optimizer=contract.Optimizer(
            kind=optimizer.kind,
            settings=optimizer.settings(),
            weight_decay=optimizer.weight_decay,
            clip=optimizer.clip,
        ),
        rate=tuple(contract.RatePhase(p.shape, p.start, p.end, p.end_tokens) for p in block.rate),
        seed=block.seed,
        checkpoint=contract.Checkpoints(
            every=checkpoint.every,
            keep=checkpoint.keep,
            best=checkpoint.best,
            keep_every=checkpoint.keep_every,
            failure=checkpoint.failure,
        )
        if checkpoint
        else None,
        validate=contract.Validation(validate.every, validate.batches) if validate else None,
    )


def optimizer_state(spec: Spec) -> contract.OptimizerState:
    """What the optimizer of a run keeps, by the row of its kind."""
    row = spec.train.optimizer
    state = (contract.StateTensor(each.name, TORCH_DTYPE[getattr(spec.precision, each.role)]) for each in row.state)
    return contract.OptimizerState(tuple(state), row.unit)


def data(block: Data) -> contract.Data:
    tokenizer = block.tokenizer
    return contract.Data(
        source=block.source,
        tokenizer=tokenizer if isinstance(tokenizer, str) else contract.TrainedTokenizer(tokenizer.vocab),
        validation=block.validation,
    )


def phases(phases: Iterable[Phase]) -> tuple[contract.Phase, ...]:
    return tuple(contract.Phase(phase.value, phase.until_tokens) for phase in phases)

"""The data of a run, in the form that the runtime reads (runtime/contract/data.py). It does not depend on a plan."""

from __future__ import annotations

from dataclasses import replace

from dsl.facts import shares
from dsl.schema import Data, Filters, Spec, TrainTokenizer
from runtime import contract


def data_request(spec: Spec) -> contract.DataRequest:
    """The data, vocabulary and seed from which the data of a run is prepared."""
    return contract.DataRequest(data(spec.data), spec.model.vocab, spec.train.seed)


def data(block: Data) -> contract.DataRecipe:
    tokenizer = block.tokenizer
    return contract.DataRecipe(
        source=block.source,
        tokenizer=contract.TrainedTokenizer(tokenizer.vocab) if isinstance(tokenizer, TrainTokenizer) else tokenizer,
        validation=block.validation,
        sources=tuple(
            contract.BlendSource(
                blended.name,
                blended.files,
                weight,
                block.fim if blended.fim is None else blended.fim,
                _filters(block.filters if blended.filters is None else blended.filters),
            )
            for blended, weight in zip(
                block.sources, shares.integer_weights([blended.weight for blended in block.sources]), strict=True
            )
        )
        if block.sources
        else (),
        chat=contract.ChatRecipe(block.chat.template, block.chat.long, block.chat.pack) if block.chat else None,
        documents=block.documents,
        column=block.column,
        fim=0.0 if block.sources else block.fim,
        end_id=block.end_id,
        filters=None if block.sources else _filters(block.filters),
        prompts=contract.PromptsRecipe(**dict(block.prompts)) if block.prompts else None,
    )


def _filters(block: Filters | None) -> contract.FiltersRecipe | None:
    """The filters of a source, or None if they leave out nothing."""
    filters = contract.FiltersRecipe(**dict(block)) if block else contract.FiltersRecipe()
    if filters.duplicates != "near":
        filters = replace(filters, similarity=contract.FiltersRecipe.similarity)
    return None if filters == contract.FiltersRecipe() else filters

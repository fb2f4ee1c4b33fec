"""Runs all segments of a model on expert ranks in one process: F in order, then I and W of each segment in reverse."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from compiler import ir
from compiler.model.segments.interpret import cut
from compiler.plan.blocks import cut_model
from compiler.plan.parameters import parameters
from compiler.plan.stages import build_stages
from dsl.schema import Spec
from tests.compiler.model.segments.running import Functions, call, load

Values = dict[str, Tensor]


@dataclass
class Ranks:
    """Values of each rank, parameters and accumulators by tensor name, and the emitted segments by key."""

    spec: Spec
    params: list[Values]
    accumulators: list[Values]
    values: list[Values]
    loaded: dict[object, tuple[Functions, ir.Cut]] = field(default_factory=dict)
    inside: dict[str, list[Values]] = field(default_factory=dict)  # by site: a segment's values by local names

    def segment(self, use: ir.Use) -> tuple[Functions, ir.Cut]:
        key = use.segment.key
        if key not in self.loaded:
            self.loaded[key] = load(use.segment), cut(use.segment)
        return self.loaded[key]

    def forward(self, use: ir.Use) -> None:
        functions, segment_cut = self.segment(use)
        self.inside[use.site] = []
        for params, values in zip(self.params, self.values, strict=True):
            local = {name: params[tensor] for name, tensor in use.params}
            local |= {i.name: values[v] for i, v in zip(use.segment.inputs, use.inputs, strict=True)}
            local |= call(functions, segment_cut, "F", local)
            values |= {v: local[o.name] for o, v in zip(use.segment.outputs, use.outputs, strict=True)}
            self.inside[use.site].append(local)

    def backward(self, use: ir.Use) -> None:
        functions, segment_cut = self.segment(use)
        tangents = [(o.name, v) for o, v in zip(use.segment.outputs, use.outputs, strict=True) if o.grad]
        gradients = [(i.name, v) for i, v in zip(use.segment.inputs, use.inputs, strict=True) if i.grad]
        for local, values, sums in zip(self.inside[use.site], self.values, self.accumulators, strict=True):
            local |= {f"d_{name}": values[f"d_{value}"] for name, value in tangents}
            local |= {f"g_{name}": sums[tensor] for name, tensor in use.params if tensor in sums}
            local |= call(functions, segment_cut, "I", local)
            call(functions, segment_cut, "W", local)
            values |= {f"d_{value}": local[f"d_{name}"] for name, value in gradients}

    def exchange(self, step: ir.Communication, backward: bool) -> None:
        """Rows to their experts' ranks, which have them expert after expert, or back the same way."""
        ranks = range(len(self.values))
        counts = torch.stack([v[f"{step.site}_counts"].unflatten(0, (len(ranks), -1)) for v in self.values])
        count: list[list[list[int]]] = counts.tolist()  # [source][expert rank][local expert]
        experts = range(counts.shape[2])
        moved = 2 if step.kind == "dispatch" else 1  # rows and gate weights, or rows
        for before, after in zip(step.inputs[:moved], step.outputs[:moved], strict=True):
            source, target = (f"d_{after.name}", f"d_{before}") if backward else (before, after.name)
            at_source = [(s, r, e) for s in ranks for r in ranks for e in experts]  # as the rows, rank after rank
            at_expert = [(s, r, e) for r in ranks for e in experts for s in ranks]
            to_experts = (step.kind == "dispatch") != backward
            before_order, after_order = (at_source, at_expert) if to_experts else (at_expert, at_source)
            owner = 0 if to_experts else 1  # which of a piece's three numbers is the rank that has it here
            pieces: dict[tuple[int, int, int], torch.Tensor] = {}
            for rank, values in enumerate(self.values):
                mine = [piece for piece in before_order if piece[owner] == rank]
                pieces |= zip(mine, values[source].split([count[s][r][e] for s, r, e in mine]), strict=True)
            for rank, values in enumerate(self.values):
                values[target] = torch.cat([pieces[piece] for piece in after_order if piece[1 - owner] == rank])
        if step.kind == "dispatch" and not backward:
            for rank, values in enumerate(self.values):
                values[step.outputs[2].name] = counts[:, rank].sum(0).cumsum(0).to(torch.int32)


def run(spec: Spec, tensors: Values, data: list[Values], constants: dict[str, float]) -> tuple[list[Values], Values]:
    """(values of each rank, gradients by logical name summed over ranks) of one micro-batch on each expert rank.

    tensors: parameters by logical name; data: tokens, targets, … of each rank; constants: the gradient of each loss.
    """
    num_ranks = spec.parallel.expert
    rows = parameters(spec)
    params: list[Values] = [{} for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for tensor in dict.fromkeys(row.tensor for row in rows):
            members = [row for row in rows if row.tensor == tensor]
            local = len(members) // num_ranks
            mine = members if members[0].expert is None else members[rank * local :][:local]
            stacked = [tensors[row.name] for row in mine]
            params[rank][tensor] = stacked[0] if members[0].expert is None else torch.stack(stacked)
    biases = {row.tensor for row in rows if row.role == "bias"}
    sums = [{t: torch.zeros_like(p) for t, p in ps.items() if t not in biases} for ps in params]
    ranks = Ranks(spec, params, sums, [dict(d) for d in data])
    stages = build_stages(cut_model(spec), 1)
    for step in stages[0].steps:
        if isinstance(step, ir.Use):
            ranks.forward(step)
        else:
            ranks.exchange(step, backward=False)
    for values in ranks.values:
        values |= {
            f"d_{value}": torch.tensor(constants[constant], dtype=torch.float64)
            for value, constant in stages[0].tangents
        }
    for step in reversed(stages[0].steps):
        if isinstance(step, ir.Use):
            ranks.backward(step)
        else:
            ranks.exchange(step, backward=True)
    gradients: Values = {}
    for row in rows:
        if row.role == "parameter":
            if row.expert is None:
                gradients[row.name] = sum(s[row.tensor] for s in sums)  # type: ignore[assignment]
            else:
                rank, local = divmod(row.expert, len(params[0][row.tensor]))
                gradients[row.name] = sums[rank][row.tensor][local]
    return ranks.values, gradients

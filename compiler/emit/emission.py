"""The files of a build folder, as text: plan, programs, stages, segments, kernels and certificates."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from compiler.emit.build_files import (
    kernels_json,
    launches_json,
    plan_json,
    plan_text,
    program_json,
    train_py,
    watch_json,
)
from compiler.emit.graphs import Replays
from compiler.emit.kernels import KERNELS, KernelTarget, emit_kernel
from compiler.emit.kernels.calls import updates as calls_of_optimizer
from compiler.emit.quantised import rows, weight_quantisations
from compiler.emit.stage_modules import StageModules, add_origin_comment
from compiler.ir import Body, Program, SegmentCode
from compiler.model.ops.implementations import choices_of
from compiler.plan.spec_files import standing_alone, texts_of_files
from compiler.predict.planned_step import PlannedStep
from compiler.program.lower.estimate import Overlap, overlaps_of, rank_times
from compiler.program.lowered import LoweredPlan
from compiler.program.proof import ProofFacts
from compiler.schedule.schedule import Schedule
from dsl.canonical import canonical
from dsl.schema import Spec
from runtime import contract
from runtime.contract.names import ProgramName

# --- `certificate/<program>.json`: the result of a program's proof, which `dsc train` checks again before ranks start

Exchanges = tuple[contract.Exchanged, ...]


@dataclass(frozen=True)
class Certificates:
    """The certificates of one build. `digests`: those of its files, by path."""

    digests: Mapping[str, str]
    _exchanges: dict[int, Exchanges] = field(default_factory=dict, init=False)  # by id of the body; programs share them

    def json(self, name: str, program: Program, schedule: Schedule, certificate: ProofFacts) -> str:
        """Facts of the proof, digests of the plan, the program and the stage modules, and the messages of each body
        (for the check before ranks start). `name`: of the program's file.
        """
        wanted = [
            "plan.json",
            f"program/{name}.json",
            *(f"stages/rank_{rank}.py" for rank in range(schedule.num_ranks)),
        ]
        return contract.Certificate(
            schedule=digest(schedule.to_text()),
            files={file: self.digests[file] for file in wanted},
            facts=_facts(certificate),
            bodies=tuple({body.name: self._exchanges_of(body) for body in bodies} for bodies in program.bodies),
        ).to_json()

    def _exchanges_of(self, body: Body) -> Exchanges:
        if id(body) not in self._exchanges:
            exchanged = [contract.Exchanged(i.kind, i.peer, i.producer, i.slot) for _, i in body.messages]
            self._exchanges[id(body)] = tuple(exchanged)
        return self._exchanges[id(body)]


def _facts(certificate: ProofFacts) -> contract.Facts:
    return contract.Facts(
        num_ranks=certificate.num_ranks,
        num_micro_batches=certificate.num_micro_batches,
        num_actions=certificate.num_actions,
        num_instructions=certificate.num_instructions,
        num_messages=certificate.num_messages,
        num_exchanges=certificate.num_exchanges,
        num_collectives=certificate.num_collectives,
        peak_activations=certificate.peak_activations,
        peak_fixed_bytes=certificate.peak_fixed_bytes,
        peak_bytes=certificate.peak_bytes,
    )


def digest(text: str) -> str:
    """The sha256 of a file's text."""
    return hashlib.sha256(text.encode()).hexdigest()


# --- emission

HOPPER_SMS = 132


@dataclass(frozen=True)
class Emission:
    """Produces the files of a build from a lowered spec, its emitted segments and its predicted step."""

    spec: Spec
    lowered: LoweredPlan
    codes: Mapping[Hashable, SegmentCode]  # by key of the segment
    planned: PlannedStep

    @cached_property
    def overlaps(self) -> dict[ProgramName, Overlap]:
        """The predicted overlap of compute and communication in each program."""
        return overlaps_of(self.lowered.programs, rank_times(self.lowered.lowering))

    @cached_property
    def bodies(self) -> list[list[Body]]:
        """The bodies of each pipeline rank in all programs."""
        return all_bodies(self.lowered.programs, self.lowered.plan.mesh.pp)

    @cached_property
    def replays(self) -> Replays | None:
        """The calls of segments that ranks replay as CUDA graphs; None if the run does not ask for graphs."""
        return Replays.of(body for of_rank in self.bodies for body in of_rank) if self.spec.kernels.graphs else None

    @property
    def graphs(self) -> contract.GraphCalls | None:
        """How many calls of segments are replayed in a step of the largest batch; None without graphs."""
        main = ProgramName.of("train", self.lowered.main_schedule.num_micro_batches)
        return self.replays.count(self.lowered.programs[main]) if self.replays else None

    @cached_property
    def resolved_text(self) -> str:
        """The text of the spec with all defaults filled in."""
        return canonical(standing_alone(self.spec))

    def files(self) -> dict[str, str]:
        """All files by path, without the manifest and the pages that tools add."""
        files = self._plan_files() | self._segment_files() | self._stage_files()
        return files | self._certificate_files(files)

    def _plan_files(self) -> dict[str, str]:
        spec, lowered = self.spec, self.lowered
        updates = [  # an optimizer may run on torch without a kernel
            (call, emit_kernel(call.op, call.arguments, num_sms(spec)) if call.op in KERNELS else None)
            for call in calls_of_optimizer(spec)
        ]
        named = [(call, kernel.name if kernel else None) for call, kernel in updates]
        quantisations = weight_quantisations(lowered.plan, num_sms(spec))
        files = {
            "spec.resolved": self.resolved_text,
            "kernels.json": kernels_json(spec, lowered.plan, self.codes, quantisations, named, self.graphs),
            "launches.json": launches_json(lowered.plan, self.codes, quantisations, named),
            "plan.json": plan_json(spec, lowered, self.overlaps, rows(quantisations)),
            "plan.txt": plan_text(spec, lowered, self.overlaps),
            "schedule.txt": lowered.main_schedule.to_text(),
            "train.py": train_py(spec),
            "watch.json": watch_json(spec, self.planned),
        }
        files |= texts_of_files(spec)
        files |= {
            f"kernels/{file.name}.py": file.source
            for file in (*(kernel for _, kernel in updates), *(row.kernel for row in quantisations.values()))
            if file
        }
        orders = lowered.micro_batch_orders
        return files | {
            f"program/{name}.json": program_json(p, orders.get(name, ())) for name, p in lowered.programs.items()
        }

    def _segment_files(self) -> dict[str, str]:
        files = {}
        first = {use.segment.key: use for use in reversed(self.lowered.plan.uses)}  # the first use, in model order
        for key, use in first.items():
            code = self.codes[key]
            name = f"segments/{code.name}.py"
            assert name not in files, f"the segment at {use.site} differs from another with the same constants"
            files[name] = add_origin_comment(code, use, self.spec.model, self.resolved_text)
            files |= {f"kernels/{name}.py": text for name, text in code.kernels}
        return files

    def _stage_files(self) -> dict[str, str]:
        plan = self.lowered.plan
        modules: dict[str, str] = {use.site: self.codes[use.segment.key].name for use in plan.uses}
        stages = StageModules(modules, self.replays.has) if self.replays else StageModules(modules)
        return {f"stages/rank_{rank}.py": stages.rank_module(rank, bodies) for rank, bodies in enumerate(self.bodies)}

    def _certificate_files(self, files: Mapping[str, str]) -> dict[str, str]:
        lowered = self.lowered
        certificates = Certificates({name: digest(text) for name, text in files.items()})
        return {
            f"certificate/{name}.json": certificates.json(name, lowered.programs[name], lowered.schedules[name], proven)
            for name, proven in lowered.certificates.items()
        }


def num_sms(spec: Spec) -> int:
    """SMs for compute kernels. A device without SMs is a CPU; its kernels are emitted for a Hopper GPU."""
    return min(device.sms or HOPPER_SMS for device in spec.cluster.devices) - spec.sm.communication


def kernel_target(spec: Spec) -> KernelTarget:
    """What the text of a spec's kernels depends on."""
    return KernelTarget(num_sms(spec), tuple(sorted(choices_of(spec.kernels).items())))


def all_bodies(programs: Mapping[ProgramName, Program], num_ranks: int) -> list[list[Body]]:
    """The bodies of each pipeline rank in all programs. Bodies with the same name must be equal."""
    result = []
    for rank in range(num_ranks):
        table: dict[str, Body] = {}
        for program in programs.values():
            for body in program.bodies[rank]:
                assert table.setdefault(body.name, body) == body, f"{body.name} differs between programs"
        result.append([table[name] for name in sorted(table)])
    return result

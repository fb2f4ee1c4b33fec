"""Spec → build folder, as values: plan, programs, proofs, emitted segments and stages, and a manifest.

Pure: the same spec gives the same bytes. `write_build`, of compiler.emit.folder, puts them into a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from compiler.actions.order_cache import Orders
from compiler.decide import Lowered, lower_spec
from compiler.emit.build_files import manifest, plan_json, plan_text, program_json, train_py
from compiler.emit.build_summary import does_not_fit, summary
from compiler.emit.certificate import Certificates, digest
from compiler.emit.folder import write_build
from compiler.emit.kernel_list import kernels_json
from compiler.emit.origin import with_origin
from compiler.emit.quantised import quantised, rows
from compiler.emit.segment_cache import Segments
from compiler.emit.stage_modules import StageModules
from compiler.ir import Body, Program, SegmentCode
from compiler.kernels import KERNELS, emit_kernel
from compiler.kernels.calls import updates as calls_of_optimizer
from compiler.lower.estimate import Overlap, overlaps_of, rank_times
from compiler.report.page import report_html
from compiler.report.planned import Planned
from compiler.report.report import Report
from compiler.report.sections import report_of
from compiler.report.watch_file import watch_json
from compiler.spec_files import standing_alone, texts_of_files
from dsl.canonical import canonical
from dsl.schema import Spec

__all__ = ["Build", "Files", "compile_spec", "num_sms", "write_build"]

Files = tuple[tuple[str, str], ...]  # (path in the build folder, text)
HOPPER_SMS = 132
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Build:
    files: Files
    summary: str  # in a few lines
    warning: str  # where the plan does not fit the spec's devices
    # For a cache: its segments (compiler/emit/segment_cache.py), and orders (compiler/actions/order_cache.py).
    entries: Files = ()

    @property
    def digest(self) -> str:
        """sha256 of the manifest, which names the build: what `dsc train --expect` takes."""
        return digest(dict(self.files)["manifest.json"])


def compile_spec(
    spec: Spec,
    progress: Progress = lambda _: None,
    segments: Segments | None = None,
    orders: Orders | None = None,
) -> Build:
    """Everything that `dsc compile` writes. Raises ProofError before anything is emitted.

    The build has the files that the spec names, and its spec names those.

    `segments`, `orders`: who finds emitted segments and orders of instructions, in a cache or anew. The build has the
    entries of those it is of, for the caller to store.
    """
    segments, orders = segments or Segments(), orders or Orders()
    progress("plan, schedules, proofs")
    lowered = lower_spec(spec, progress, orders)
    different = {use.segment.key: use.segment for use in lowered.plan.uses}
    codes: dict[Hashable, SegmentCode] = {
        key: segments.code(segment, num_sms(spec), progress) for key, segment in different.items()
    }
    emission = _Emission(spec, lowered, codes)
    files = emission.files()
    entries = segments.entries(different.values(), num_sms(spec)) | orders.entries
    return Build(
        files=(*sorted(files.items()), ("manifest.json", manifest(files))),
        summary=summary(spec, lowered, emission.overlaps, emission.planned.ranks),
        warning=does_not_fit(spec, lowered),
        entries=tuple(sorted(entries.items())),
    )


@dataclass(frozen=True)
class _Emission:
    """A lowered spec with its emitted segments, by key → the files of its build, by path."""

    spec: Spec
    lowered: Lowered
    codes: Mapping[Hashable, SegmentCode]

    @cached_property
    def overlaps(self) -> dict[str, Overlap]:
        """How each program uses the two lanes, as predicted."""
        return overlaps_of(self.lowered.programs, rank_times(self.lowered.lowering))

    @cached_property
    def report(self) -> Report:
        """The report that becomes the page of the build."""
        return report_of(self.spec, self.lowered)

    @property
    def planned(self) -> Planned:
        """The predicted times and memory of a step."""
        assert self.report.planned is not None
        return self.report.planned

    @cached_property
    def resolved(self) -> str:
        """The spec with nothing left open."""
        return canonical(standing_alone(self.spec))

    def files(self) -> dict[str, str]:
        """Every file but the manifest."""
        files = self._plan_files() | self._segment_files() | self._stage_files()
        return files | self._certificate_files(files)

    def _plan_files(self) -> dict[str, str]:
        spec, lowered = self.spec, self.lowered
        updates = [  # an optimizer may run on torch alone
            (call, emit_kernel(call.op, call.arguments, num_sms(spec)) if call.op in KERNELS else None)
            for call in calls_of_optimizer(spec)
        ]
        of_few_bits = quantised(lowered.plan, num_sms(spec))
        files = {
            "spec.resolved": self.resolved,
            "kernels.json": kernels_json(
                spec,
                lowered.plan,
                self.codes,
                of_few_bits,
                [(call, kernel.name if kernel else None) for call, kernel in updates],
            ),
            "plan.json": plan_json(spec, lowered, self.overlaps, rows(of_few_bits)),
            "plan.txt": plan_text(spec, lowered, self.overlaps),
            "schedule.txt": lowered.main_schedule.to_text(),
            "report.html": report_html(self.report),
            "train.py": train_py(spec),
            "watch.json": watch_json(spec, self.planned),
        }
        files |= texts_of_files(spec)
        files |= {
            f"kernels/{file.name}.py": file.source
            for file in (*(kernel for _, kernel in updates), *(each.kernel for each in of_few_bits.values()))
            if file
        }
        orders = lowered.micro_batch_orders
        return files | {
            f"program/{name}.json": program_json(p, orders.get(name, ())) for name, p in lowered.programs.items()
        }

    def _segment_files(self) -> dict[str, str]:
        files = {}
        first = {use.segment.key: use for use in reversed(self.lowered.plan.uses)}  # in model order its first use
        for key, use in first.items():
            code = self.codes[key]
            files[f"segments/{code.name}.py"] = with_origin(code, use, self.spec.model, self.resolved)
            files |= {f"kernels/{name}.py": text for name, text in code.kernels}
        return files

    def _stage_files(self) -> dict[str, str]:
        plan = self.lowered.plan
        stages = StageModules({use.site: self.codes[use.segment.key].name for use in plan.uses})
        ranks = enumerate(all_bodies(self.lowered.programs, plan.mesh.pp))
        return {f"stages/rank_{rank}.py": stages.rank_module(rank, bodies) for rank, bodies in ranks}

    def _certificate_files(self, files: Mapping[str, str]) -> dict[str, str]:
        lowered = self.lowered
        certificates = Certificates({name: digest(text) for name, text in files.items()})
        return {
            f"certificate/{name}.json": certificates.json(name, lowered.programs[name], lowered.schedules[name], proven)
            for name, proven in lowered.certificates.items()
        }


def num_sms(spec: Spec) -> int:
    """SMs that compute kernels may use; a device without any is a CPU, whose kernels are for a Hopper it may meet."""
    return min(device.sms or HOPPER_SMS for device in spec.cluster.devices) - spec.sm.communication


def all_bodies(programs: Mapping[str, Program], num_ranks: int) -> list[list[Body]]:
    """The bodies of each pipeline rank over all programs; one name is one body."""
    result = []
    for rank in range(num_ranks):
        table: dict[str, Body] = {}
        for program in programs.values():
            for body in program.bodies[rank]:
                assert table.setdefault(body.name, body) == body, f"{body.name} differs between programs"
        result.append([table[name] for name in sorted(table)])
    return result

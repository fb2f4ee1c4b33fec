"""Spec → build folder, as values: plan, programs, proofs, emitted segments and stages, and a manifest.

Pure: the same spec gives the same bytes. `write_build`, of compiler.emit.folder, puts them into a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.decide import lower_spec
from compiler.emit.build_files import manifest, plan_json, plan_text, program_json, train_py
from compiler.emit.build_summary import does_not_fit, summary
from compiler.emit.certificate import certificate_json, digest
from compiler.emit.folder import write_build
from compiler.emit.kernel_list import kernels_json
from compiler.emit.origin import with_origin
from compiler.emit.stage_modules import emit_rank
from compiler.ir import Body, Plan, Program, SegmentCode
from compiler.kernels import emit_kernel
from compiler.kernels.calls import update as call_of_optimizer
from compiler.lower.estimate import overlaps_of, rank_times
from compiler.lower.lanes import best_order
from compiler.lower.order_cache import Orders
from compiler.rates.spec_table import own_table
from compiler.report.page import report_html
from compiler.report.sections import report_of
from compiler.schedules.schedule import Schedule
from compiler.schedules.spec_schedule import PLACED, RATED, standing_alone
from compiler.segments import cache, emit
from compiler.topology.rank_kinds import rank_rates
from dsl.canonical import canonical
from dsl.schema import Spec

if TYPE_CHECKING:
    from compiler.experts.spec_placement import OwnPlacement  # with numpy

__all__ = ["Build", "Files", "compile_spec", "num_sms", "write_build"]

Files = tuple[tuple[str, str], ...]  # (path in the build folder, text)
HOPPER_SMS = 132
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Build:
    files: Files
    summary: str  # in a few lines
    warning: str  # where the plan does not fit the spec's devices
    # For a cache: its segments (compiler/segments/cache.py), and orders (compiler/lower/order_cache.py).
    entries: Files = ()

    @property
    def digest(self) -> str:
        """sha256 of the manifest, which names the build: what `dsc train --expect` takes."""
        return digest(dict(self.files)["manifest.json"])


def compile_spec(
    spec: Spec,
    progress: Progress = lambda _: None,
    codes: dict[object, SegmentCode] | None = None,
    own: Schedule | None = None,
    placement: OwnPlacement | None = None,
    cached: Path | None = None,
) -> Build:
    """Everything that `dsc compile` writes. Raises ProofError before anything is emitted.

    `own`: the schedule of the file that the spec names; the build has it as schedule.txt, and its spec names that.
    `placement`: of experts, from the file that it names; the build has it as placement.json. A rate table that it names
    is in its value already (compiler/rates/spec_table.py); the build has it as rates.json.

    `codes`: segments traced before, by key and number of SMs; what is traced here is added. `cached`: a cache of
    entries, there or not, to look into for others and for orders of their instructions; the build then has those it
    is of, for the caller to keep.
    """
    assert (placement is not None) == (spec.parallel.placement is not None), "the placement that a spec names is read"
    progress("plan, schedules, proofs")
    orders = Orders(cached) if cached else None
    best = orders.best if orders else best_order
    lowered = lower_spec(spec, own, progress, placement, best)
    plan, resolved = lowered.plan, canonical(standing_alone(spec))
    overlaps = overlaps_of(lowered.programs, rank_times(plan, plan.cuts, rank_rates(spec)))
    keys = _keys(spec, plan) if cached else {}
    segments = _trace(spec, plan, progress, {} if codes is None else codes, cached, keys)
    first = {use.segment.key: use for use in reversed(plan.uses)}  # in model order the first use of each segment
    modules = {use.site: segments[use.segment.key].name for use in plan.uses}
    optimizer = call_of_optimizer(spec)
    kernel = emit_kernel(optimizer.op, optimizer.arguments, num_sms(spec))
    files = {
        "spec.resolved": resolved,
        "kernels.json": kernels_json(spec, plan, segments, optimizer, kernel.name if kernel else None),
        "plan.json": plan_json(spec, lowered, overlaps),
        "plan.txt": plan_text(spec, lowered, overlaps),
        "schedule.txt": lowered.main_schedule.to_text(),
        "report.html": report_html(report_of(spec, lowered, best=best)),
        "train.py": train_py(spec),
    }
    files |= {PLACED: placement.text} if placement else {}
    files |= {RATED: table.to_json()} if (table := own_table(spec)) else {}
    files |= {f"program/{name}.json": program_json(p) for name, p in lowered.programs.items()}
    for key, use in first.items():
        code = segments[key]
        files[f"segments/{code.name}.py"] = with_origin(code, use, spec.model, resolved)
        files |= {f"kernels/{name}.py": text for name, text in code.kernels}
    if kernel:
        files[f"kernels/{kernel.name}.py"] = kernel.source
    statements: dict[int, str] = {}  # texts, by instruction: many are of several bodies
    for rank, bodies in enumerate(_all_bodies(lowered.programs, plan.mesh.pp)):
        files[f"stages/rank_{rank}.py"] = emit_rank(rank, bodies, modules, statements)
    digests = {name: digest(text) for name, text in files.items()}
    told: dict[int, str] = {}
    for name, proven in lowered.certificates.items():
        of = (lowered.programs[name], lowered.schedules[name], proven)
        files[f"certificate/{name}.json"] = certificate_json(name, *of, digests, told)
    said = summary(spec, lowered, overlaps)
    kept = {f"{cache.FOLDER}/{name}.json": cache.entry(name, segments[key]) for key, name in keys.items()}
    entries = tuple(sorted((kept | (orders.entries if orders else {})).items()))
    written = (*sorted(files.items()), ("manifest.json", manifest(files)))
    return Build(written, said, does_not_fit(spec, lowered), entries)


def _keys(spec: Spec, plan: Plan) -> dict[object, str]:
    """The names of a cache's entries by the keys of a plan's segments."""
    sms, tools = num_sms(spec), cache.tools()
    different = {use.segment.key: use.segment for use in plan.uses}
    return {key: cache.key_of(segment, sms, tools) for key, segment in different.items()}


def _trace(
    spec: Spec,
    plan: Plan,
    progress: Progress,
    codes: dict[object, SegmentCode],
    cached: Path | None,
    keys: Mapping[object, str],
) -> dict[object, SegmentCode]:
    """The emitted segments of a plan by their key, each traced once, or found in the folder `cached`."""
    sms = num_sms(spec)
    for use in plan.uses:
        key = use.segment.key
        if (key, sms) not in codes:
            found = cache.find(cached, keys[key], use.segment) if cached else None
            if found is None:
                progress(f"trace {use.segment.kind}")
                found = emit(use.segment, sms)
            codes[key, sms] = found
    return {use.segment.key: codes[use.segment.key, sms] for use in plan.uses}


def num_sms(spec: Spec) -> int:
    """SMs that compute kernels may use; a device without any is a CPU, whose kernels are for a Hopper it may meet."""
    return min(device.sms or HOPPER_SMS for device in spec.cluster.devices) - spec.sm.communication


def _all_bodies(programs: Mapping[str, Program], num_ranks: int) -> list[list[Body]]:
    """The bodies of each pipeline rank over all programs; one name is one body."""
    result = []
    for rank in range(num_ranks):
        table: dict[str, Body] = {}
        for program in programs.values():
            for body in program.bodies[rank]:
                assert table.setdefault(body.name, body) == body, f"{body.name} differs between programs"
        result.append([table[name] for name in sorted(table)])
    return result

"""The whole toolchain on one page: a spec becomes a build, in named steps.

    read      SPEC, -s      → ChosenSpec            compiler/predict/choose.py: with its files, and `auto` decided
    plan      Spec          → Plan                  what each rank holds and runs
    schedule  Plan          → Schedule, each batch  the order of actions
    lower     Schedule      → Program               bodies of instructions for each rank
    prove     Program       → Certificate           or raises ProofError
    predict   Lowered       → PredictedStep         time, memory, network
    emit      Lowered       → files                 segments, kernels, stages, certificates

All but `read` are pure: the same spec gives the same bytes. `write_build` (compiler/emit/folder.py) puts them into a
folder. Nothing before `emit` imports torch, and `emit` imports it only to trace a segment that is not in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from compiler.emit.build_files import manifest
from compiler.emit.build_summary import memory_error_text, summary
from compiler.emit.emission import Emission, digest, kernel_target
from compiler.emit.segment_cache import Segments
from compiler.ir import Program, SegmentCode
from compiler.plan.actions.order import Orders
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.plan.split_blocks import planned_received_rows
from compiler.predict.memory_state import proven_memories
from compiler.predict.micro_batch_order import micro_batch_orders
from compiler.predict.planned_step import PredictedStep, predict_step
from compiler.predict.predict import scheduler_of
from compiler.predict.torch_share import refuse_slow_ops
from compiler.program.lower import Lowering
from compiler.program.lower.opening_order import opening_order
from compiler.program.lowered import LoweredPlan
from compiler.program.proof import ProofFacts, Prover
from compiler.program.proof.start import check_start
from compiler.schedule.one_f_one_b import forward_only
from compiler.schedule.schedule import Schedule
from dsl.closed_forms import ramp
from dsl.schema import Spec
from runtime.contract.names import ProgramName

Files = tuple[tuple[str, str], ...]  # (path in the build folder, text)
Progress = Callable[[str], None]
Pages = Callable[[Spec, LoweredPlan, PredictedStep], Mapping[str, str]]  # → further files, for people


@dataclass(frozen=True)
class CompiledBuild:
    """The result of `dsc compile`."""

    files: Files
    summary: str  # a few lines
    warning: str  # why the plan does not fit the spec's devices; "" if it does
    entries: Files = ()  # cache entries for the segments and orders of this build

    @property
    def digest(self) -> str:
        """sha256 of the manifest, which names the build: what `dsc train --expect` takes."""
        return digest(dict(self.files)["manifest.json"])


def compile_spec(
    spec: Spec,
    progress: Progress = lambda _: None,
    segments: Segments | None = None,
    orders: Orders | None = None,
    pages: Pages = lambda *_: {},
) -> CompiledBuild:
    """Compile a spec. Raises ProofError or SlowOpsError before anything is emitted.

    `segments` and `orders` supply emitted segments and orders of instructions, from a cache or computed. `pages` adds
    files for people, such as the report (compiler/tools/report).
    """
    segments, orders = segments or Segments(), orders or Orders()
    progress("plan, schedules, proofs")
    lowered = lower_spec(spec, progress, orders)
    refuse_slow_ops(spec, lowered.plan, lowered.lowering.rates[0])
    step = predict_step(spec, lowered)
    distinct = {use.segment.key: use.segment for use in lowered.plan.uses}
    codes: dict[Hashable, SegmentCode] = {
        key: segments.code(segment, kernel_target(spec), progress) for key, segment in distinct.items()
    }
    emission = Emission(spec, lowered, codes, step.planned)
    files = {**emission.files(), **pages(spec, lowered, step)}
    entries = segments.entries(distinct.values(), kernel_target(spec)) | orders.entries
    return CompiledBuild(
        files=(*sorted(files.items()), ("manifest.json", manifest(files))),
        summary=summary(spec, lowered, emission.overlaps, step.planned.ranks, emission.graphs),
        warning=memory_error_text(spec, lowered),
        entries=tuple(sorted(entries.items())),
    )


def lower_spec(
    spec: Spec,
    progress: Progress = lambda _: None,
    orders: Orders | None = None,
) -> LoweredPlan:
    """Plan, schedule, lower and prove, without torch. Raises ProofError, which names the rank and the action.

    `progress` is called with messages of a search. `orders` supplies the orders of instructions.
    """
    growth = ramp.ramp_of_spec(spec)
    num_steps = growth.steps_for(spec.train.tokens)
    plan, split = make_plan(spec), planned_received_rows(spec)
    lowering = Lowering(plan, rank_rates(spec), orders)
    schedules = schedule(spec, lowering, progress)
    programs = {name: lowering.program(run_schedule, not name.trains) for name, run_schedule in schedules.items()}
    certificates = prove(Prover(plan, split), programs)
    openings = opening_order(plan, programs.values())
    check_start(plan, openings, programs.values())
    return LoweredPlan(
        lowering=lowering,
        batches=tuple((size.first_step, size.batch) for size in growth.sizes if size.first_step < num_steps),
        num_steps=num_steps,
        schedules=schedules,
        programs=programs,
        certificates=certificates,
        openings=openings,
        memories=proven_memories(spec, plan, certificates.values()),
        micro_batch_orders=micro_batch_orders(spec, lowering, schedules),
    )


def schedule(spec: Spec, lowering: Lowering, progress: Progress = lambda _: None) -> dict[ProgramName, Schedule]:
    """The schedule of each program: `train_8` for each number of micro-batches, `evaluate_8` for forwards only."""
    plan, counts = lowering.plan, ramp.micro_batches(spec)
    scheduler = scheduler_of(spec, lowering, progress)
    schedules = {ProgramName.of("train", n): scheduler.schedule(n) for n in counts}
    if spec.train.validate is not None or spec.train.grpo is not None:  # completions are generated by forwards, too
        n = counts[-1]
        schedules[ProgramName.of("evaluate", n)] = forward_only(plan.stage_placement, plan.mesh.pp, n)
    return schedules


def prove(prover: Prover, programs: Mapping[ProgramName, Program]) -> dict[ProgramName, ProofFacts]:
    """Prove each program. Raises ProofError."""
    return {name: prover.prove(program) for name, program in programs.items()}

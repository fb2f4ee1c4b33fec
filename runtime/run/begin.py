"""The start of a run: from its first step, from initial weights, or from a checkpoint of this or an earlier phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.build.build import Build
from runtime.checkpoint.durable_files import num_published
from runtime.contract import node_kind
from runtime.data.preparation import UsageError
from runtime.observe.slots import Slots, count
from runtime.system.outcome import EXIT_RETRY, refusal_code

if TYPE_CHECKING:  # they import torch, which takes a second; Ctrl-C must be handled before
    from runtime.comm.connect import Transport
    from runtime.launch.torchrun_meet import TorchrunRank
    from runtime.run.loop import Loop
    from runtime.step.start import Start


@dataclass(frozen=True)
class RunOptions:
    """Options of a run, beyond its build."""

    run: Path
    data: Path  # paths of the data are relative to this folder
    steps: int | None
    resume: bool
    hang_timeout_s: float | None
    device: str  # auto, cpu, cuda or shared
    transport: Transport
    profile: int | None  # steps
    skip_batch: bool
    cache: Path | None  # folder of prepared data that runs share
    start_timeout_s: float
    debug: int | None = None  # the rank that is debugged in the terminal
    restarts: int = 0  # most restarts after failures without a new checkpoint between
    elastic: bool = False  # continue with the available number of ranks
    gather_s: float = 0.0  # how long after the start of torchrun an elastic run waits for missing ranks
    copies: bool = True  # copy checkpoints to and from the places in the spec
    slots: Slots | None = None  # devices of a replay
    kept_because: str = ""  # why the run cannot go on without the device of a straggler


class EarlierError(UsageError):
    """The run folder has no good checkpoint of the end of the phase before this one."""


class NothingToDoError(Exception):
    """The run or phase has already ended."""


def holds_checkpoint(run: Path) -> bool:
    """Whether the run has a published checkpoint, valid or not. A first save that was killed does not count."""
    try:
        return num_published(run / "checkpoints") > 0
    except OSError as error:
        raise UsageError(f"{run / 'checkpoints'}: {error.strerror}") from None


def check_places(build: Build, options: RunOptions, say: Callable[[str], None]) -> None:
    """Check the places that the spec copies checkpoints to. With `resume`, copy their newest valid checkpoint into the
    run folder, unless the folder has one at least as new. Without `resume` they must have no checkpoint.

    One rank calls this, before `loop_of`. Raises UsageError.
    """
    from runtime.checkpoint.places import LOCAL, PlaceError, inventory, places_of
    from runtime.checkpoint.restore import restore
    from runtime.checkpoint.shard_manifest import CheckpointError
    from runtime.observe.events import Events
    from runtime.observe.health import record

    saved = build.plan.train.checkpoint
    copies = options.copies and options.debug is None and options.profile is None
    if saved is None or saved.to == (LOCAL,) or not copies:
        return
    try:
        places = places_of(saved.to, options.data, options.run)
        if options.resume:
            options.run.mkdir(parents=True, exist_ok=True)
            given_up = partial(record.is_given_up, done=record.rollbacks(options.run))
            if restored := restore(options.run, places, say, given_up):
                name, manifest, place = restored
                Events(options.run).write("restore", step=manifest.step, checkpoint=name, place=place.text)
        elif names := (contents := inventory(places)).names:
            place_words = contents.entries[0][0].text if contents.entries else "a place of its checkpoints"
            raise UsageError(
                f"{place_words} holds {names[-1]} of an earlier run: go on with --resume, or name another place in "
                "`checkpoint { to }`"
            )
    except PlaceError as error:
        raise UsageError(error) from None
    except CheckpointError as error:
        raise UsageError(error, EXIT_RETRY) from None
    except OSError as error:
        raise UsageError(f"the run cannot start: {error}", refusal_code(error)) from None
    say(f"checkpoints are copied to {' and '.join(copy_place.text for copy_place in places)}")


def loop_of(
    build: Build, options: RunOptions, corpus: Path, say: Callable[[str], None], place: TorchrunRank | None = None
) -> Loop:
    """Return the loop that the ranks of a run execute, after printing notes about its start. UsageError if the run
    cannot start, NothingToDoError if no step is left."""
    from runtime.observe.device import check_ranks, choose
    from runtime.ops.native.library import missing
    from runtime.run.loop import Loop, Ranks
    from runtime.run.starting_position import order_of, start_position
    from runtime.step.start import Start

    try:
        device = choose(options.device, place.local_world if place else build.plan.mesh.world)
        if place and device == "cuda":
            check_ranks(node_kind(build.plan.cluster, place.rank), place.local_world)
        order = order_of(build, corpus)
    except ValueError as error:
        raise UsageError(error) from None
    if build.plan.train.grpo and (reason := missing()):
        raise UsageError(f"generating completions needs the C++ ops: {reason}")
    if device == "cpu" and (reason := missing()):
        say(f"ops run on torch, which takes about twice as long: {reason}")
    local_rank, debugged = (place.local_rank if place else None), options.debug is not None
    start_s, places_from = options.start_timeout_s, options.data if options.copies else None
    kept_because = _reason_to_keep_stragglers(options, place)
    ranks = Ranks(device, options.transport, local_rank, start_s, options.slots, debugged, kept_because)
    if (health := build.plan.train.health) and health.straggler == "exclude":
        if device != "cpu":
            say("health: slow ranks are not found on GPUs, where waiting counts as computing")
        elif kept_because:
            say(f"health: a slow rank is reported, and its device stays: {kept_because}")
    start = Start(start_position(order))
    loop = Loop(build, options.run, corpus, options.steps, start, ranks, options.profile, places_from)
    if options.slots and not place and (reason := options.slots.refusal(build.plan.mesh.world, device, count(device))):
        raise UsageError(reason)
    try:
        loop.say_rows(say)
    except ValueError as error:
        raise UsageError(error) from None
    loop = replace(loop, start=_start(loop, options, say))
    if loop.start.saved is not None and loop.start.step >= loop.total:
        raise NothingToDoError(f"step {loop.start.step} of {loop.total} is reached; set a later one with --steps")
    return loop


def _reason_to_keep_stragglers(options: RunOptions, place: TorchrunRank | None) -> str:
    """Return why the run cannot go on without the device of a straggler, "" if it can."""
    if place:
        return "torchrun starts the ranks again on the same machines"
    return options.kept_because if options.elastic else "to leave it out, use --restarts N --elastic"


def _start(loop: Loop, options: RunOptions, say: Callable[[str], None]) -> Start:
    """Return the start of the loop, from a verified checkpoint or from initial weights, after printing notes."""
    from runtime.checkpoint.shard_manifest import CheckpointError
    from runtime.observe.events import Events
    from runtime.observe.health import record
    from runtime.run.phases import EarlierPhaseError, PhaseOverError
    from runtime.run.resume import find, initial_weights, skip_bad_batches, text_of
    from runtime.state.snapshot import put_untrained, put_weights
    from runtime.step.start import Start

    try:
        (record.give_up if options.resume else record.forget)(options.run)
    except OSError as error:
        raise UsageError(f"{options.run}: {error.strerror}", refusal_code(error)) from None
    plan, start, notes = loop.build.plan, loop.start, list[str]()
    goes_on = options.resume and holds_checkpoint(options.run)
    if (within := plan.train.within) and within.number > 1 and not goes_on:
        hint = "go on with --resume" if holds_checkpoint(options.run) else "train that one first, into the same folder"
        raise EarlierError(
            f"this is phase {within.number} of {within.phases} of a run; it starts from the checkpoint that the "
            f"previous phase leaves in {options.run}: {hint}"
        )
    if options.resume and not goes_on:
        say(f"{options.run} holds no checkpoint to go on from: starting with step 1")
    try:
        if goes_on:
            resumption = find(options.run / "checkpoints", loop.build, loop.corpus, loop.ranks.device)
            start = Start(resumption.position, resumption.recent, saved=resumption.checkpoint)
            notes += resumption.notes
        if not goes_on or plan.keeps_first_weights:
            weights, weight_notes = initial_weights(plan, options.data)
            start = replace(start, weights=weights, load=put_untrained if plan.adapter else put_weights)
            notes += weight_notes
    except EarlierPhaseError as error:
        raise EarlierError(error) from None
    except PhaseOverError as error:
        raise (NothingToDoError if options.profile is None else UsageError)(error) from None
    except CheckpointError as error:
        Events(options.run).write("refused", reason=str(error))
        raise UsageError(error) from None
    position, recent, note = record.restore_with_rollbacks(
        options.run, start.position, start.recent, text_of(loop.corpus)
    )
    for note_text in [*notes, *([note] if note else [])]:
        say(note_text)
    if options.skip_batch:
        position, note = skip_bad_batches(options.run, position, loop.corpus)
        say(note)
    return replace(start, position=position, recent=recent)

"""Starting the ranks of a run on one machine: they are forked, and again after a failure.

The parent process has imported torch and opened the build, so a restart is a fork, a new rendezvous, and loading the
newest valid checkpoint.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.build.build import Build
from runtime.checkpoint.shard_manifest import CheckpointError, find_manifest
from runtime.data.preparation import UsageError
from runtime.launch.debug import LeftError, restore_terminal, watch
from runtime.observe.health.record import rollbacks
from runtime.observe.sinks.beside import Exporters
from runtime.run.begin import NothingToDoError, RunOptions, check_places, loop_of
from runtime.system.outcome import EXIT_USAGE, Outcome, refusal_code
from runtime.system.streams import tell

if TYPE_CHECKING:  # they import torch, which the parent process imports while its data is prepared
    from runtime.observe.events import Events
    from runtime.run.loop import Loop


class Restarts:
    """Decides whether ranks are restarted after a failure: at most `limit` times without a new checkpoint between, and
    not if the same failure comes twice in a row, because it would come again."""

    def __init__(self, limit: int) -> None:
        self.limit, self.number = limit, 0
        self._saved, self._last = -1, object()

    def refusal(self, outcome: Outcome, saved: int) -> str | None:
        """Return None if the ranks are restarted after a failure, else the reason why not ("" if restarts are off).

        `saved`: the step of the newest checkpoint.
        """
        failure = (outcome.rank, outcome.step, outcome.reason)
        is_repeated, self._last = failure == self._last, failure
        self.number = 1 if saved > self._saved else self.number + 1
        self._saved = max(saved, self._saved)
        if not self.limit or outcome.kind not in ("failed", "hung"):
            return ""
        if is_repeated:
            return "the same failure came again: the ranks are not started again"
        if self.number > self.limit:
            return f"no checkpoint was saved in {self.limit} restarts: the ranks are not started again"
        return None

    def begin_again(self) -> None:
        """Reset the count, because a different set of ranks starts now."""
        self.number, self._last = 0, object()


class FewerDevices:
    """The devices that a run continues with after it removed the device of a rank that failed repeatedly.

    A failed rank does not prove a broken device. So if fewer ranks fail at the same step in the same way, no further
    device is removed. `build`: the build for all devices, with which the next `dsc train` starts.
    """

    def __init__(self, build: Build) -> None:
        self._build, self._num_devices, self._last = build, build.plan.mesh.world, object()

    def is_other(self, outcome: Outcome) -> bool:
        """Whether to remove a device for a repeated failure: yes, unless a device was just removed for the same
        failure."""
        failure = (outcome.step, outcome.reason)
        is_repeated, self._last = failure == self._last, failure
        return not is_repeated and self._num_devices > 1

    def remove_device(self, rank: int, options: RunOptions) -> Build:
        """Return the build for the remaining devices without that of a rank. UsageError if there is none."""
        tell(f"going on without the device of rank {rank}")
        fewer = self._build_without_one(options)
        self._remove(rank, fewer, options)
        return fewer

    def remove_straggler(self, rank: int, slowdown: float, options: RunOptions) -> Build | None:
        """Return the build for the remaining devices without that of a slow rank. If that would not be faster, say why
        and return None. `slowdown`: how many times as long the rank takes."""
        try:
            fewer = self._build_without_one(options)
        except UsageError as error:
            tell(f"going on with the device of rank {rank}: {error}")
            return None
        if (num_left := fewer.plan.mesh.world) * slowdown <= self._num_devices:
            tell(f"going on with the device of rank {rank}: {num_left} devices without it are slower")
            return None
        tell(f"going on without the device of rank {rank}")
        self._remove(rank, fewer, options)
        return fewer

    def _build_without_one(self, options: RunOptions) -> Build:
        from runtime.launch.elastic import build_without

        return build_without(self._build, self._num_devices - 1, options.run, tell)

    def _remove(self, rank: int, fewer: Build, options: RunOptions) -> None:
        """Hide the device of a rank from the next ranks, which execute the build `fewer`."""
        from runtime.observe.device import choose

        if (
            choose(options.device, self._num_devices) == "cuda"
        ):  # ranks are forked before CUDA is initialised, and read this
            devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self._num_devices)))
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
                name for index, name in enumerate(devices.split(",")) if index != rank
            )
        self._num_devices = fewer.plan.mesh.world


def train(build: Build, options: RunOptions, corpus: Path) -> int:
    """Launch the ranks of a build until the run ends or may not be restarted. Return the exit code.

    The caller holds the lock of the run folder. Raises UsageError if the run cannot start.
    """
    exporters, code = Exporters(build, options.run), EXIT_USAGE
    try:
        code = _train(build, options, corpus, exporters)
    finally:
        exporters.close(waits=code == 0)
    return code


def _train(build: Build, options: RunOptions, corpus: Path, exporters: Exporters) -> int:
    """Run the restart loop of `train`."""
    from runtime.observe.events import Events

    restarts, events, fewer = Restarts(options.restarts), Events(options.run), FewerDevices(build)
    while True:
        check_places(build, options, tell)
        try:
            loop = loop_of(build, options, corpus, tell)
        except NothingToDoError as no_work:
            tell(f"nothing to do: {no_work}")
            return 0
        num_rollbacks = len(rollbacks(options.run))
        if options.debug is None and options.profile is None and options.slots is None:
            exporters.begin()
        try:
            outcome, step = _start(build, options, loop)
        except LeftError as leave_error:
            tell(str(leave_error))
            return leave_error.exit_code
        if len(rollbacks(options.run)) > num_rollbacks:
            tell(f"rolled back: {outcome.reason}")
            options = replace(options, resume=True, skip_batch=False)
            continue
        if not outcome.slowdown:
            _say(outcome)
        saved = newest_step(options.run)
        refusal = None if outcome.slowdown else restarts.refusal(outcome, saved)
        if outcome.slowdown:
            build, options = _without_straggler(build, options, fewer, outcome)
            restarts.begin_again()
        elif refusal and options.elastic and fewer.is_other(outcome):
            print(f"error: {refusal}", file=sys.stderr)
            build = fewer.remove_device(outcome.rank or 0, options)
            restarts.begin_again()
        elif refusal is not None:
            if refusal:
                print(f"error: {refusal}", file=sys.stderr)
            _write_end(events, outcome, step)
            return outcome.exit_code
        events.write(
            "restart",
            number=restarts.number,
            step=step,
            saved_step=saved,
            reason=outcome.reason,
            exit_code=outcome.exit_code,
        )
        if refusal is None and not outcome.slowdown:
            tell(f"starting the ranks again: restart {restarts.number} of {restarts.limit}")
        options = replace(options, resume=True, skip_batch=False)


def _without_straggler(
    build: Build, options: RunOptions, fewer: FewerDevices, outcome: Outcome
) -> tuple[Build, RunOptions]:
    """Return the build and options that the run goes on with, after it ended because of a slow rank."""
    tell(outcome.reason)
    without = fewer.remove_straggler(outcome.rank or 0, outcome.slowdown, options)
    if without is None:
        return build, replace(options, kept_because="the run would not be faster without it")
    return without, options


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint with a valid manifest in a run folder; 0 if there is none."""
    try:
        return find_manifest(run).manifest.step
    except CheckpointError:
        return 0


def _start(build: Build, options: RunOptions, loop: Loop) -> tuple[Outcome, int]:
    """Fork the ranks and watch them. Return how they ended, and the last step that was shown."""
    from runtime.launch.launcher import launch
    from runtime.launch.rank_watch import Supervision
    from runtime.observe.device import BACKENDS

    view = loop.progress()
    watched = (watch, None) if loop.ranks.is_debugged else (view.poll, options.hang_timeout_s)
    supervision = Supervision(*watched, options.start_timeout_s)
    try:
        with restore_terminal() if loop.ranks.is_debugged else nullcontext():
            outcome = launch(
                loop.rank,
                build.plan.mesh.world,
                folder=options.run,
                supervision=supervision,
                backend=BACKENDS[loop.ranks.device],
                debugged=options.debug,
                is_locked=True,
            )
    except OSError as error:
        raise UsageError(f"the run cannot start: {error}", refusal_code(error)) from None
    finally:
        view.close()
    return outcome, view.step


def _write_end(events: Events, outcome: Outcome, step: int) -> None:
    events.write("end", outcome=outcome.kind, exit_code=outcome.exit_code, step=step, reason=outcome.reason)
    events.close()


def _say(outcome: Outcome) -> None:
    if outcome.kind == "stopped":
        print(f"{outcome}; go on with --resume", file=sys.stderr)
    elif not outcome.ok:
        print(f"error: {outcome}", file=sys.stderr)

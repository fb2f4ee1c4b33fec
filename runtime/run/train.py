"""Train a build: `python -P -m runtime.run.train BUILD --out RUN`, or `torchrun --nproc-per-node W BUILD/train.py`.

Without torchrun it prepares the data, forks one rank per device and watches them; under torchrun it is one rank. Exit
codes: 0 trained · 1 a rank failed · 2 the build, the data or the run folder cannot be used · 3 hung · 75 as 2, for a
temporary reason: the run folder is busy, the disk is full, the preparation of the data was killed · 128 + signal when
asked to stop.

With `--unbuilt` the build is still being compiled, and this process starts with the work that does not need it: a line
on stdin has the data request (see runtime/data/__main__.py), a second line the digest of the finished build. If stdin
ends instead, the process exits silently. With `--compiled SHA256` the build exists already. In both cases the process
exits silently with EXIT_REPLACED if the folder has another build by then, and with EXIT_EARLIER if the build is for a
phase that the run has not reached.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from runtime.build.build import Build, BuildError, OtherBuildError
from runtime.contract import DataRequest
from runtime.contract.options import DEBUG_SUFFIX, EXIT_EARLIER, EXIT_REPLACED, FOREVER_S, add_options, run_name
from runtime.data.preparation import Preparation, UsageError, start_preparation
from runtime.launch.debug import MARK, take_folder
from runtime.launch.room import cannot_save, memory_shortage
from runtime.launch.run_lock import RunFolderBusyError, lock_folder
from runtime.observe.sinks.beside import Exporters
from runtime.observe.slots import Slots
from runtime.run.begin import EarlierError, NothingToDoError, RunOptions, check_places, holds_checkpoint, loop_of
from runtime.run.starts import train
from runtime.system.outcome import EXIT_RETRY, printable, refusal_code
from runtime.system.streams import open_streams, tell

EXIT_INTERRUPTED = 130


class ReplacedError(Exception):
    """The folder holds another build than the one that was compiled for this run."""


def main(argv: Sequence[str] | None = None, build: Path | None = None, agent: int | None = None) -> int:
    """Train a build. `build`: its folder, if the caller is the train.py of the build. `agent`: the process of torchrun,
    if this one was forked by the server that it has on this machine."""
    open_streams()
    args = _parse(argv, build)
    if args.elastic and _is_under_torchrun() and build is not None and agent is None:
        from runtime.launch.fork_server import train_in_fork

        words = sys.argv[1:] if argv is None else argv
        if (code := train_in_fork("runtime.run.train", words, build)) is not None:
            return code
    try:
        return _run(args, agent or os.getppid())
    except ReplacedError:
        return EXIT_REPLACED
    except UsageError as error:
        if isinstance(error, EarlierError) and (args.compiled or args.unbuilt):
            return EXIT_EARLIER
        if message := "\n".join(map(printable, str(error).splitlines())):
            clear = "\r\x1b[K" if args.unbuilt and sys.stderr.isatty() else ""  # erases the compiler's progress line
            print(f"{clear}error: {message}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:  # before the ranks started: after that the launcher handles the signal
        return EXIT_INTERRUPTED


def _is_under_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def _run(args: argparse.Namespace, agent: int) -> int:
    opened = None if args.unbuilt else _open(args.build, args.expect, args.compiled, edited=args.debug)
    name = opened.plan.run if opened else args.build.name
    run = args.out or Path("runs") / (run_name(name) + DEBUG_SUFFIX * args.debug)
    data = args.data or Path.cwd()
    options = RunOptions(
        run=run,
        data=data,
        steps=args.steps,
        resume=args.resume,
        hang_timeout_s=args.hang_timeout,
        device=args.device,
        transport=args.transport,
        profile=args.profile,
        skip_batch=args.skip_batch,
        cache=args.data_cache,
        start_timeout_s=FOREVER_S if args.debug else args.start_timeout or FOREVER_S,
        restarts=args.restarts,
        elastic=args.elastic,
        gather_s=FOREVER_S if args.gather is None else args.gather,
        copies=not args.no_copies and args.replay is None,
        slots=args.replay,
    )
    if args.debug and opened:
        options = _debug_options(opened, options, args.debug_rank)
    elif (run / MARK).exists():
        raise UsageError(f"{run} holds a debug run: name another folder with --out")
    under_torchrun = _is_under_torchrun()
    _check_options(options, under_torchrun=under_torchrun)
    if opened is not None and under_torchrun:
        return _join(opened, options, agent)
    _check_is_free(run)
    _check_run_folder(options)
    if opened is None:
        return _supervise_unbuilt(args.build, options, args.expect)
    return _supervise(opened, options)


def _check_options(options: RunOptions, *, under_torchrun: bool) -> None:
    """Raise UsageError for options that exclude each other."""
    if options.profile is not None and options.steps is not None:
        raise UsageError("--profile N ends after the steps that it profiles: leave --steps out")
    if options.skip_batch and not options.resume:
        raise UsageError("--skip-batch skips the bad batches of an earlier run: it needs --resume")
    if options.restarts and under_torchrun:
        raise UsageError("torchrun starts ranks again by itself: give it --max-restarts, and leave --restarts out")
    if options.slots and under_torchrun:
        raise UsageError("--replay belongs to dsc replay, which starts all ranks on one machine")
    if options.elastic and not under_torchrun and not options.restarts:
        raise UsageError("--elastic needs torchrun, which sets the number of ranks, or --restarts N")
    if options.gather_s and not (options.elastic and under_torchrun):
        raise UsageError("--gather needs --elastic under torchrun: without it, a run waits for all its ranks")
    if options.restarts and (options.debug is not None or options.profile is not None):
        raise UsageError("--restarts cannot be combined with --debug or --profile")


def _check_is_free(run: Path) -> None:
    """Raise UsageError if another run uses the folder. Called early, and again when the ranks start."""
    try:
        os.close(lock_folder(run, create=False))
    except RunFolderBusyError as error:
        raise UsageError(error, EXIT_RETRY) from None
    except OSError:  # the folder does not exist; other errors show when it is used
        return


def _check_run_folder(options: RunOptions) -> None:
    _check_place(options.run)
    if not options.resume and holds_checkpoint(options.run):
        raise UsageError(f"{options.run} holds an earlier run: go on with --resume, or name another folder with --out")


def _check_place(run: Path) -> None:
    """Raise UsageError if the metrics of a run folder cannot be read or written."""
    from runtime.observe.metrics import FILE, check_metrics

    try:
        check_metrics(run)
    except OSError as error:
        hint = "move it away, or name another folder with --out"
        raise UsageError(f"{printable(str(run / FILE))} cannot be used: {error.strerror}: {hint}") from None


def _debug_options(build: Build, options: RunOptions, rank: int) -> RunOptions:
    """Return the options of a debug run, after printing what was edited in the build."""
    if options.resume or options.profile is not None or _is_under_torchrun():
        raise UsageError("--debug starts at step 1; it cannot be combined with --resume, --profile or torchrun")
    world = build.plan.mesh.world
    if rank >= world:
        raise UsageError(f"--debug-rank {rank}: the last rank of this build is {world - 1}")
    try:
        if reason := take_folder(options.run, build.edits):
            raise UsageError(reason)
    except OSError as error:
        raise UsageError(f"{options.run} cannot be written: {error.strerror}") from None
    for edit in build.edits:
        tell(f"edited: {edit.partition(';')[0]}")
    tell(f"debug: rank {rank} of {world} has the terminal; nothing hangs, and no checkpoint is saved")
    return replace(options, debug=rank)


def _open(folder: Path, expect: str | None, compiled: str | None, *, edited: bool = False) -> Build:
    """Return the verified build. expect: the digest that the user asks for. compiled: the digest of the build that was
    compiled for this run. edited: files may differ from the manifest."""
    try:
        build = Build.open(folder, compiled or expect, edited=edited)
    except OtherBuildError as error:
        raise (ReplacedError if compiled else UsageError)(error) from None
    except BuildError as error:
        raise UsageError(error) from None
    if expect not in (None, build.digest):
        raise UsageError(f"{folder} is not the build that was asked for: its digest is {build.digest}, not {expect}")
    return build


def _parse(argv: Sequence[str] | None, build: Path | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m runtime.run.train" if build is None else "train.py", allow_abbrev=False
    )
    if build is None:
        parser.add_argument("build", type=Path, metavar="BUILD", help="folder written by dsc compile")
        parser.add_argument("--unbuilt", action="store_true", help="stdin announces the build when it is compiled")
        parser.add_argument("--compiled", metavar="SHA256", help="digest of the build that was compiled for this run")
        parser.add_argument("--data-cache", type=Path, metavar="DIR", help="prepared data that runs share")
    parser.add_argument(
        "--replay", type=_slots, metavar="SLOTS", help="for dsc replay: where ranks compute; watch them"
    )
    add_options(parser)
    return parser.parse_args(argv, argparse.Namespace(build=build, unbuilt=False, compiled=None, data_cache=None))


def _slots(text: str) -> Slots:
    try:
        return Slots.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _supervise(build: Build, options: RunOptions) -> int:
    _check_room(build, options)
    with _start_preparation(build.plan.data_request, options) as preparation:
        preparation.may_talk()
        import_torch()  # takes a second, during which the data is prepared
        corpus = preparation.corpus()
    return _train(build, options, corpus)


def _supervise_unbuilt(folder: Path, options: RunOptions, expect: str | None) -> int:
    """Supervise the ranks of a build that is compiled while the data is prepared."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        request = stdin.readline()
        if not request:
            return EXIT_INTERRUPTED
        with _start_preparation(DataRequest.from_json(request), options) as preparation:
            build = None
            if preparation.text_is_found():  # most errors of the data are known by then
                import_torch()
                if digest := preparation.read_line_unless_failed(stdin):
                    build = _open(folder, expect, digest)
                    _check_room(build, options)
                elif not preparation.has_failed:
                    preparation.kill()
                    return EXIT_INTERRUPTED
            preparation.may_talk()
            corpus = preparation.corpus()
    assert build is not None, "the data is prepared, but there is no build"
    return _train(build, options, corpus)


def _train(build: Build, options: RunOptions, corpus: Path) -> int:
    with _hold_lock(options.run):
        _check_run_folder(options)  # again: another run may have used the folder while the data was prepared
        return train(build, options, corpus)


@contextmanager
def _hold_lock(run: Path) -> Iterator[None]:
    """Lock the run folder. Ranks inherit the lock, so it lasts until they have ended."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(run)
    except RunFolderBusyError as error:
        raise UsageError(error, EXIT_RETRY) from None
    except OSError as error:
        raise UsageError(f"the run cannot start: {error}", refusal_code(error)) from None
    try:
        yield
    finally:
        os.close(lock)


def _start_preparation(request: DataRequest, options: RunOptions) -> AbstractContextManager[Preparation]:
    return start_preparation(request, options.data, options.run / "data", cache=options.cache, resume=options.resume)


def _check_room(build: Build, options: RunOptions, ranks: range | None = None) -> None:
    """Raise UsageError if memory or disk space is too small. `ranks`: the ranks on this machine, None for all."""
    if options.device == "cpu" and (reason := memory_shortage(build.plan, ranks)):
        raise UsageError(reason)
    steps = options.steps or build.plan.steps
    if options.profile is None and options.slots is None and (refusal := cannot_save(build.plan, options.run, steps)):
        raise UsageError(*refusal)


def import_torch() -> None:
    """Import torch once, for all ranks. SIGINT is blocked meanwhile: its exception would be lost inside a callback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    gc.disable()  # an import leaves no garbage; looking for it takes a tenth of the time
    try:
        import runtime.launch.launcher
        import runtime.run.loop  # noqa: F401
    finally:
        gc.freeze()  # ranks do not scan these objects either, which would copy their pages
        gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _join(build: Build, options: RunOptions, agent: int) -> int:
    """Run one rank under torchrun. The first rank to ask prepares the data, the others wait for it. `agent`: the
    process of torchrun on this machine."""
    from runtime.data.__main__ import prepare_here
    from runtime.data.files import DataError
    from runtime.launch.elastic import build_for, compile_ahead, wait_for_machines
    from runtime.launch.torchrun import RefusedError, attach
    from runtime.launch.torchrun_meet import TorchrunRank
    from runtime.observe.device import BACKENDS
    from runtime.observe.events import Events
    from runtime.observe.metrics import FILE

    try:
        place = TorchrunRank.of(os.environ, agent)
    except ValueError as error:
        raise UsageError(error) from None
    if options.elastic:
        options = replace(options, resume=True)
    whole = build
    if place.world != (compiled := build.plan.mesh.world):
        if not options.elastic:
            hint = f"torchrun --nproc-per-node {compiled}, or --elastic after train.py to continue with any number"
            raise UsageError(f"this build is for {compiled} ranks: {hint}")
        first_says = tell if place.rank == 0 else lambda _: None
        wait_for_machines(build, place, options.run / FILE, options.gather_s, first_says)
        build = build_for(build, place, options.run, tell)
    try:
        ranks = attach(place, options.run, build.digest, options.hang_timeout_s, options.start_timeout_s)
    except RefusedError as error:
        if place.local_rank == 0:
            raise UsageError(error, error.code) from None
        return error.code
    say = tell if ranks.prints_shared else lambda _: None
    try:
        if ranks.was_restarted:
            options = replace(options, resume=True)
            goes_on = holds_checkpoint(options.run)
            origin = "they go on from a checkpoint" if goes_on else "no checkpoint was saved, so from step 1"
            say(f"torchrun started the ranks again: {origin}")
        else:
            _check_run_folder(options)
        ranks.run_on_first(lambda: check_places(build, options, say))
        first = place.rank - place.local_rank
        _check_room(build, options, range(first, first + place.local_world))
        corpus = prepare_here(build.plan.data_request, options.data, options.run / "data", options.resume, say)
        loop = loop_of(build, options, corpus, say, place)
    except NothingToDoError as no_work:
        say(f"nothing to do: {no_work}")
        return ranks.train(lambda *_: None, BACKENDS["cpu"])
    except (UsageError, DataError, OSError) as error:
        ranks.refuse(str(error), error.code if isinstance(error, UsageError) else refusal_code(error))
    if options.elastic:
        compile_ahead(whole, place, options.run)
    view = loop.progress() if place.rank == 0 else None
    exporters = Exporters(build, options.run)
    if view is not None and options.profile is None:
        exporters.begin()
    code = ranks.train(partial(loop.rank, view=view), BACKENDS[loop.ranks.device])
    if view is not None:
        kind = "stopped" if code else "finished"
        Events(options.run).write("end", outcome=kind, exit_code=code, step=view.step, reason="")
    exporters.close(waits=code == 0)
    return code


if __name__ == "__main__":
    sys.exit(main())

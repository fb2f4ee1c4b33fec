"""`dsc train [SPEC[:RUN] | BUILD] [--steps N] [--out RUN]`: compile the spec if needed, then run the ranks.

dsc train                          the one spec of this folder → runs/<run>
dsc train spec.dsc --steps 20 -s train.batch=32
dsc train build/quickstart --resume
dsc train --profile                measure where the time of a step goes
dsc train build/quickstart --debug run an edited build, with print and breakpoint()

The phases of a run are trained one after the other, each from the last checkpoint of the one before. With --resume,
training continues in the phase of the newest checkpoint.

The report is written only when a run finishes, so that failures are reported at once. `dsc report RUN` writes it for
other runs.

Exit codes: 0 done · 1 a rank failed · 2 the spec, the data or the command line is wrong · 3 hung, or an internal error
of dsc · 75 the run folder is busy, the disk is full or data preparation was killed: try again later · 128 + signal when
asked to stop, after a checkpoint, or when a process of the run was killed
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

from compiler.cli.commands.common import EXIT_SPEC, add_spec_arguments, is_refused, load_phases, report_error
from compiler.cli.commands.compile import add_cache
from compiler.tools.training import Training, train_build, train_phases
from runtime.build.files import MANIFEST
from runtime.contract.options import add_options
from runtime.system.streams import open_streams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser, "a spec file, SPEC:RUN, or a build folder; default: the spec in the current folder")
    add_options(parser)
    add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Train, even if the output pipe is closed.

    Returns the exit code of the ranks (see runtime/system/outcome.py), or 2 if there is nothing to train.
    """
    open_streams()
    names = {field.name for field in fields(Training)} - {"changes", "output"}
    training = Training(**{name: getattr(args, name) for name in names}, changes=tuple(args.set))
    if args.spec and os.path.lexists(Path(args.spec) / MANIFEST):
        if args.set:
            print(f"error: {args.spec} is compiled already: -s needs the spec", file=sys.stderr)
            return EXIT_SPEC
        return train_build(training, Path(args.spec)).code
    phases = load_phases(args.spec, args.set)
    if phases is None or any([is_refused(phase) for phase in phases]):
        return EXIT_SPEC
    if len(phases) > 1 and args.expect is not None:
        first = phases[0].argument
        return report_error("--expect names one build, and this run has several phases", f"name one: `{first}`")
    return train_phases(training, phases).code

"""Opens the model that a command line names: a source of compiler/tools/inference/sources.py, or a folder of published
weights."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

from compiler.cli.commands import import_
from compiler.tools.inference.sources import InferenceError, ModelSource, find_source


@contextmanager
def open_model_source(argument: str, spec: str | None) -> Iterator[ModelSource]:
    """Open a trained model. Published weights are imported into a temporary folder, removed on exit.

    Raises InferenceError or SpecError.
    """
    folder = Path(argument)
    if not (folder / import_.CONFIG).is_file() or spec is not None:
        yield find_source(argument, spec)
        return
    with tempfile.TemporaryDirectory(prefix="dsc-import-", ignore_cleanup_errors=True) as name:
        spec_path = Path(name) / "imported.dsc"
        parser = argparse.ArgumentParser()
        import_.add_arguments(parser)
        with redirect_stdout(sys.stderr):
            code = import_.run(parser.parse_args(["hf", str(folder), "-o", str(spec_path)]))
        if code:
            raise InferenceError(f"{folder} cannot be imported", "see the messages above")
        yield replace(find_source(str(spec_path)), published=argument)

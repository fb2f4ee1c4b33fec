"""Checks that a build, a checkpoint or a run is complete and undamaged: `python -P -m runtime.checkpoint.verify PATH
[--format json]`.

It executes nothing and writes nothing. Exit codes: 0 whole · 1 damaged · 2 no build, checkpoint or run · 141 the output
pipe was closed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.build.build import Build, BuildError
from runtime.build.files import MANIFEST, read_file, versions
from runtime.contract.names import WEIGHT, StoredName
from runtime.system.outcome import printable
from runtime.system.regular_files import read_bytes

VERSION = 1  # of the JSON
EXIT_DAMAGED, EXIT_USAGE, EXIT_BROKEN_PIPE = 1, 2, 141
_CHECKPOINT = re.compile(r"step-[0-9]{8,}(\.[1-9][0-9]*)?")
_OF_A_RUN = ("metrics.jsonl", "checkpoints", "spec.resolved", "trace", "logs")
_FOLDERS = ("checkpoints", "data", "logs", "memory", "trace")  # of a run
_LINES = ("metrics.jsonl", "events.jsonl", "trace/*.jsonl")  # files with one JSON object per line
_JSON = ("load.json", "memory/*.json")
_TEXTS = ("spec.resolved", "schedule.txt", "program.sha256")

Facts = dict[str, Any]


class NoSuchThingError(Exception):
    """A path is no build, checkpoint or run."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.checkpoint.verify", allow_abbrev=False)
    parser.add_argument("path", type=Path)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args(argv)
    try:
        document = verify(args.path)
    except NoSuchThingError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    try:
        print(json.dumps(document, indent=1) if args.format == "json" else text(document), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python's exit fails on the unwritten rest
        return EXIT_BROKEN_PIPE
    return 0 if document["whole"] else EXIT_DAMAGED


def verify(path: Path) -> Facts:
    """Return the document that docs/json.md describes. Raises NoSuchThingError."""
    kind = kind_of(path)
    facts, problems = {"build": _build, "checkpoint": _checkpoint, "run": _run}[kind](path)
    result: Facts = {"version": VERSION, "kind": kind, "path": str(path), "whole": not problems}
    result["problems"] = [printable(problem) for problem in problems]
    return result | {section: facts if section == kind else None for section in ("build", "checkpoint", "run")}


def kind_of(path: Path) -> str:
    """Return "build", "checkpoint" or "run" by the files in the folder, damaged or not. Raises NoSuchThingError."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except (OSError, ValueError) as error:
        raise NoSuchThingError(f"{path} is no folder: {getattr(error, 'strerror', None) or error}") from None
    if _CHECKPOINT.fullmatch(path.resolve().name) or any(name.startswith("shard.") for name in names):
        return "checkpoint"
    if MANIFEST in names or {"plan.json", "stages"} & names:
        return "build"
    if names & set(_OF_A_RUN):
        return "run"
    raise NoSuchThingError(f"{path} is no build, no checkpoint and no run: name a folder that dsc has written")


# ---------------------------------------------------------------- a build


def _build(folder: Path) -> tuple[Facts, list[str]]:
    installed = versions()
    try:
        build = Build.open(folder, edited=True)
    except BuildError as error:
        unknown = dict.fromkeys(("digest", "run", "ranks", "steps", "files", "bytes", "versions"))
        return unknown | {"installed": installed}, [str(error)]
    facts = {
        "digest": build.digest,
        "run": build.plan.run,
        "ranks": build.plan.mesh.world,
        "steps": build.plan.steps,
        "files": len(build.files),
        "bytes": sum(map(len, build.files.values())),
        "versions": dict(build.versions),
        "installed": installed,
    }
    return facts, list(build.edits)


# ---------------------------------------------------------------- a checkpoint


def _checkpoint(path: Path) -> tuple[Facts, list[str]]:
    from runtime.checkpoint.publish import load  # with torch
    from runtime.checkpoint.shard_manifest import CheckpointError

    try:
        checkpoint = load(path, verify=False)
    except CheckpointError as error:
        unknown = dict.fromkeys(
            ("step", "tokens", "parameters", "tensors", "bytes", "shards", "model", "plan", "saved_by")
        )
        return unknown | {"loads": []}, str(error).splitlines()
    problems = [problem for shard in checkpoint.manifest.shards if (problem := _shard_problem(path, shard))]
    meta, plan = checkpoint.meta, _mapping(checkpoint.meta.get("plan"))
    weights = {name: shape for name, shape in checkpoint.shapes.items() if StoredName(name).kind == WEIGHT}
    facts = {
        "step": checkpoint.step,
        "tokens": _tokens(path, checkpoint.step, meta),
        "parameters": sum(_product(shape) for shape in weights.values()),
        "tensors": len(checkpoint.shapes),
        "bytes": sum(shard.size for shard in checkpoint.manifest.shards),
        "shards": len(checkpoint.manifest.shards),
        "model": _mapping(plan.get("model")).get("name"),
        "plan": {name: plan.get(name) for name in ("mesh", "placement", "zero", "precision")},
        "saved_by": {name: meta.get(name) for name in ("build", "torch", "ops", "data", "tokenizer")},
        "loads": _what_loads(meta),
    }
    return facts, problems


def _shard_problem(path: Path, shard: Any) -> str:
    """Return why a shard is damaged, or ""."""
    from runtime.checkpoint import durable_files as files
    from runtime.checkpoint.shard_manifest import shard_layout

    try:
        with files.open_folder(path) as folder, files.open_file(folder, shard.file) as file:
            size, head = files.file_size(file), shard_layout(shard.entries).head
            if size != shard.size:
                return f"{path / shard.file}: has {size:,} bytes, {shard.size:,} were written"
            if files.read_exactly(file, 0, len(head)) != head:
                return f"{path / shard.file}: its header differs from the one in the manifest"
            if files.sha256(file, size) != shard.sha256:
                return f"{path / shard.file}: its sha256 differs from the one in the manifest"
    except OSError as error:
        return f"{path / shard.file}: {error.strerror or error}"
    return ""


def _tokens(path: Path, step: int, meta: Mapping[str, Any]) -> int | None:
    """Return the trained tokens, from the checkpoint's position in the data or else from the metrics of its run."""
    tokens = _mapping(meta.get("position")).get("tokens")
    if tokens is None and path.resolve().parent.name == "checkpoints":
        rows = _rows(path.resolve().parents[1] / "metrics.jsonl")[0]
        tokens = next((row.get("tokens") for row in rows if row.get("step") == step), None)
    return tokens if type(tokens) is int else None


def _what_loads(meta: Mapping[str, Any]) -> list[str]:
    """Return which builds can resume from a checkpoint, and when bit for bit. The rules are those of resume.py."""
    import torch

    from runtime.ops.native import library

    installed = {"torch": torch.__version__.partition("+")[0], "ops": library.identity()}
    differs = [f"{name} {meta.get(name)}, here {value}" for name, value in installed.items() if meta.get(name) != value]
    exact = "bit for bit as without a break: the same build, text, torch and ops"
    return [
        "any build of the same model, on any number of ranks, whose text is in tokens of the same tokenizer",
        exact + (f" (saved by {', '.join(differs)})" if differs else ""),
    ]


def _product(shape: Sequence[int]) -> int:
    result = 1
    for extent in shape:
        result *= extent
    return result


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# ---------------------------------------------------------------- a run


def _run(folder: Path) -> tuple[Facts, list[str]]:
    saved, problems = [], []
    checkpoints = folder / "checkpoints"
    for path in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []:
        if _CHECKPOINT.fullmatch(path.name):
            facts, wrong = _checkpoint(path)
            saved.append({"name": path.name, "step": facts["step"], "whole": not wrong})
            problems += wrong
    problems += _file_problems(folder)
    rows, _ = _rows(folder / "metrics.jsonl")
    data = []
    for path in sorted((folder / "data").glob("*/meta.json")):
        wrong = list(_data_problems(path))
        data.append({"name": path.parent.name, "whole": not wrong})
        problems += wrong
    if not (folder / "spec.resolved").is_file() and rows:
        problems.append(f"{folder / 'spec.resolved'} is missing: no report can be written of this run")
    steps = [row["step"] for row in rows if type(row.get("step")) is int]
    facts = {
        "steps": len(steps),
        "last_step": max(steps, default=None),
        "checkpoints": saved,
        "resumes_from": next((checkpoint["name"] for checkpoint in _newest_first(saved) if checkpoint["whole"]), None),
        "data": data,
    }
    return facts, problems


def _file_problems(folder: Path) -> Iterator[str]:
    """Yield problems of files of a run: a wrong kind of file, or contents that cannot be parsed."""
    for name in _FOLDERS:
        if os.path.lexists(folder / name) and not (folder / name).is_dir():
            yield f"{folder / name} is no folder"
    for pattern in (*_LINES, *_JSON, *_TEXTS):
        for path in sorted(folder.glob(pattern)):
            if path.is_symlink() or not path.is_file():
                yield f"{path} is no regular file"
            elif pattern in _LINES:
                yield from (f"{path}: line {line} is no JSON object" for line in _rows(path)[1])
            elif problem := _content_problem(path, is_json=pattern in _JSON):
                yield f"{path}: {problem}"


def _content_problem(path: Path, *, is_json: bool) -> str:
    """Return why a file is not UTF-8 or not JSON, or ""."""
    try:
        text = read_bytes(path).decode("utf-8")
        if is_json:
            json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        return f"{getattr(error, 'strerror', None) or error}"
    return ""


def _newest_first(saved: Sequence[Facts]) -> list[Facts]:
    return sorted(saved, key=lambda checkpoint: (checkpoint["step"] or 0, checkpoint["name"]), reverse=True)


def _rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rows of metrics.jsonl, and the numbers of invalid lines. An unfinished last line is ignored: it is
    being written, or the run was killed."""
    try:
        top = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return [], []
    try:
        full_lines, _, _ = read_file(top, path.name).rpartition(b"\n")
    except OSError:
        return [], []
    finally:
        os.close(top)
    rows, damaged = [], []
    for number, line in enumerate(full_lines.splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            damaged.append(number)
    return rows, damaged


def _data_problems(path: Path) -> Iterator[str]:
    """Yield problems of files of a prepared corpus that differ from its meta.json."""
    top = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listed = json.loads(read_file(top, path.name))["files"]
        wanted = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in listed.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        yield f"{path} is not what was written; the data is prepared again by the next run"
        return
    finally:
        os.close(top)
    for name, (size, digest) in wanted.items():
        file = path.parent / name
        try:
            if file.is_symlink() or not file.is_file() or file.stat().st_size != size or _sha256(file) != digest:
                yield f"{file} is not what was written; the data is prepared again by the next run"
        except (OSError, ValueError) as error:
            yield f"{file} cannot be read: {error}"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---------------------------------------------------------------- text


def text(document: Facts) -> str:
    """Render the document as text."""
    lines = [f"{document['kind']} {document['path']}: {'whole' if document['whole'] else 'damaged'}"]
    lines += [f"  {problem}" for problem in document["problems"]]
    rows = {"build": _build_rows, "checkpoint": _checkpoint_rows, "run": _run_rows}[document["kind"]](
        document[document["kind"]]
    )
    lines += [f"  {name:<13}{value}" for name, value in rows if value is not None]
    return "\n".join(map(printable, lines))


def _build_rows(facts: Facts) -> Iterator[tuple[str, Any]]:
    yield "digest", facts["digest"]
    if facts["digest"]:
        yield "run", f"{facts['run']}, {facts['steps']:,} steps on {facts['ranks']:,} rank{'s' * (facts['ranks'] > 1)}"
        yield "files", f"{facts['files']:,}, {facts['bytes']:,} bytes"
        yield "compiled", "with " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())


def _checkpoint_rows(facts: Facts) -> Iterator[tuple[str, Any]]:
    if facts["step"] is None:
        return
    tokens = f", {facts['tokens']:,} tokens" if facts["tokens"] is not None else ""
    yield "step", f"{facts['step']:,}{tokens}"
    yield "holds", f"{facts['parameters']:,} parameters of {facts['model']}, {facts['tensors']:,} tensors"
    yield "shards", f"{facts['shards']:,}, {facts['bytes']:,} bytes"
    plan = facts["plan"]
    mesh = " · ".join(f"{axis} {size}" for axis, size in _mapping(plan["mesh"]).items())
    yield "saved under", f"{mesh}, {plan['placement']}, zero {plan['zero']}"
    saved = facts["saved_by"]
    yield "saved by", f"torch {saved['torch']}, ops {saved['ops']}, build {str(saved['build'])[:12]}"
    yield from (("loads into", build) for build in facts["loads"])


def _run_rows(facts: Facts) -> Iterator[tuple[str, Any]]:
    yield "steps", f"{facts['steps']:,}, the last is {facts['last_step']:,}" if facts["steps"] else "none"
    for part in facts["checkpoints"]:
        yield "checkpoint", f"{part['name']}: {'whole' if part['whole'] else 'damaged'}"
    yield "resumes", f"from {facts['resumes_from']}" if facts["resumes_from"] else "from no checkpoint"
    for part in facts["data"]:
        yield "data", f"{part['name']}: {'whole' if part['whole'] else 'damaged'}"


if __name__ == "__main__":
    sys.exit(main())

"""The manifest of a checkpoint: its shards, and the elements of logical tensors in each shard.

The header of a shard (https://github.com/huggingface/safetensors#format) is a function of the manifest, so a shard is
never parsed: its first bytes are compared. The manifest is one line of JSON that ends with the sha256 of the rest.
This module does not import torch: the compiler reads manifests too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.durable_files import PUBLISHED
from runtime.contract.slices import Slice, held_elements, held_shape, tiling_problem
from runtime.system.outcome import ReportedError, printable

FORMAT = "dsc checkpoint 1"
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*(/[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*)*")
_SHA256 = re.compile("[0-9a-f]{64}")
_MAX_ELEMENTS = 1 << 62


class CheckpointError(ReportedError):
    """A checkpoint cannot be written, or is damaged. The message names the file."""


def shard_file(rank: int) -> str:
    return f"shard.{rank}.safetensors"


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """Elements [start, start + count) of a flattened logical tensor, or of a slice of it, in one shard: usually all of
    them."""

    name: str  # weight/layers.3.ffn.experts.17.up
    dtype: str  # F32
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    count: int
    slice: Slice | None = None

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of the slice; of the whole tensor if there is none."""
        return held_shape(self.shape, self.slice)

    @property
    def num_elements(self) -> int:
        """Elements of the slice. The entry may have only some of them."""
        return held_elements(self.shape, self.slice)

    @property
    def key(self) -> str:
        """Its name in the shard: the logical one, followed by `[slice]` for a slice and `@start` for a part."""
        name = self.name if self.slice is None else f"{self.name}[{self.slice.text}]"
        return name if self.count == self.num_elements else f"{name}@{self.start}"

    @property
    def num_bytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class CheckpointShard:
    """One file of a checkpoint. Entries are in the order of their data."""

    file: str
    size: int
    sha256: str
    entries: tuple[ShardEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """`serial` counts the checkpoints of a folder: the highest is the newest, regardless of its step."""

    step: int
    serial: int
    meta: Mapping[str, Any]
    shards: tuple[CheckpointShard, ...]


# ---------------------------------------------------------------- shards
def in_order(entries: Iterable[ShardEntry]) -> tuple[ShardEntry, ...]:
    """Sort entries in the order of their data: wide elements first, so that all are aligned; then by key."""
    return tuple(sorted(entries, key=lambda e: (-ITEM_BYTES[e.dtype], e.key)))


class ShardLayout(NamedTuple):
    """The bytes before the data of a shard, and the file offset in bytes of each entry and of the end."""

    head: bytes
    starts: tuple[int, ...]


def shard_layout(entries: Iterable[ShardEntry]) -> ShardLayout:
    """Return the layout of a shard with these entries, in order."""
    rows, starts = {}, [0]
    for e in entries:
        end = starts[-1] + e.num_bytes
        shape = e.held_shape if e.count == e.num_elements else (e.count,)
        rows[e.key] = {"dtype": e.dtype, "shape": shape, "data_offsets": (starts[-1], end)}
        starts.append(end)
    header = json.dumps(rows, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    return ShardLayout(head, tuple(len(head) + start for start in starts))


def check_complete(shards: Iterable[CheckpointShard]) -> None:
    """Raise CheckpointError unless the shards have each element of every logical tensor exactly once."""
    parts: dict[str, list[ShardEntry]] = defaultdict(list)
    for shard in shards:
        for entry in shard.entries:
            parts[entry.name].append(entry)
    for name, entries in parts.items():
        first, slices = entries[0], defaultdict[Slice | None, list[ShardEntry]](list)
        for e in entries:
            if (e.dtype, e.shape) != (first.dtype, first.shape):
                raise CheckpointError(f"{name} is {e.dtype} {e.shape} here, {first.dtype} {first.shape} there")
            slices[e.slice].append(e)
        for part, part_entries in slices.items():
            _check_parts(name if part is None else f"{name}[{part.text}]", part_entries)
        if problem := tiling_problem(first.shape, slices):
            raise CheckpointError(f"{name}: {problem}")


def _check_parts(name: str, entries: list[ShardEntry]) -> None:
    """Raise CheckpointError unless entries of one tensor, or of one slice of it, have each of its elements once."""
    covered, size = 0, entries[0].num_elements
    for e in sorted(entries, key=lambda e: (e.start, e.count)):
        if e.start != covered:
            problem = "held twice" if e.start < covered else "missing"
            raise CheckpointError(f"{name}: elements {min(covered, e.start)} to {max(covered, e.start)} are {problem}")
        covered += e.count
    if covered != size:
        raise CheckpointError(f"{name}: elements {covered} to {size} are missing")
    if len(entries) > 1 and any(e.count in (0, size) for e in entries):
        raise CheckpointError(f"{name} is held twice")


# ---------------------------------------------------------------- text
def shard_json(shard: CheckpointShard) -> dict[str, Any]:
    tensors = [
        [e.name, e.dtype, list(e.shape), e.start, e.count, *([_slice_json(e.slice)] if e.slice else [])]
        for e in shard.entries
    ]
    return {"file": shard.file, "size": shard.size, "sha256": shard.sha256, "tensors": tensors}


def _slice_json(part: Slice) -> list[Any]:
    return [part.dimension, [list(pair) for pair in part.ranges]]


def shard_from_json(row: Any, file: str) -> CheckpointShard:
    """Parse the result of `shard_json` for a shard with this file name. ValueError for anything else."""
    _demand(_is_record(row, "file", "size", "sha256", "tensors") and row["file"] == file, f"does not describe {file}")
    _demand(_is_count(row["size"]), f"bad size of {file}")
    _demand(isinstance(row["sha256"], str) and _SHA256.fullmatch(row["sha256"]), f"bad sha256 of {file}")
    _demand(isinstance(row["tensors"], list), f"bad tensors of {file}")
    entries = tuple(_entry(e) for e in row["tensors"])
    _demand(entries == in_order(entries) and len({e.key for e in entries}) == len(entries), f"bad order in {file}")
    _demand(shard_layout(entries).starts[-1] == row["size"], f"size and tensors of {file} differ")
    return CheckpointShard(file, row["size"], row["sha256"], entries)


def render(manifest: Manifest) -> str:
    """Return one line of canonical JSON that ends with its own sha256. ValueError if `meta` is not JSON (NaN is
    not)."""
    fields = {
        "format": FORMAT,
        "step": manifest.step,
        "serial": manifest.serial,
        "world": len(manifest.shards),
        "meta": manifest.meta,
        "shards": [shard_json(shard) for shard in manifest.shards],
    }
    body = json.dumps(fields, allow_nan=False)
    return f'{body[:-1]}, "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


def digest(manifest: Manifest) -> str:
    """Return the sha256 of a manifest, which covers the whole checkpoint."""
    return hashlib.sha256(render(manifest).encode()).hexdigest()


def parse(data: bytes) -> Manifest:
    """Parse the exact result of `render`. ValueError for any other bytes."""
    try:
        return _parse(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse(data: bytes) -> Manifest:
    fields = json.loads(data)
    is_record = _is_record(fields, "format", "step", "serial", "world", "meta", "shards", "sha256")
    _demand(is_record and fields["format"] == FORMAT, f"is not a {FORMAT}")
    _demand(_is_count(fields["step"]) and _is_count(fields["serial"]), "bad step or serial")
    _demand(isinstance(fields["meta"], dict) and isinstance(fields["shards"], list), "bad meta or shards")
    _demand(_is_count(fields["world"]) and fields["world"] == len(fields["shards"]), "world and shards differ")
    shards = tuple(shard_from_json(row, shard_file(rank)) for rank, row in enumerate(fields["shards"]))
    manifest = Manifest(fields["step"], fields["serial"], fields["meta"], shards)
    _demand(render(manifest).encode() == data, "its contents and its sha256 differ")
    check_complete(shards)
    return manifest


def check_name(name: str) -> None:
    """Raise ValueError unless a logical name is ASCII words with dots and slashes."""
    _demand(isinstance(name, str) and len(name) <= 500 and _NAME.fullmatch(name), f"bad tensor name {name!r}")
    _demand(name != "__metadata__", "the name __metadata__ is the format's own")


def _entry(row: Any) -> ShardEntry:
    _demand(isinstance(row, list) and len(row) in (5, 6), "bad tensor")
    name, dtype, shape, start, count, *sliced = row
    check_name(name)
    _demand(isinstance(dtype, str) and dtype in ITEM_BYTES, f"bad dtype of {name}")
    _demand(isinstance(shape, list) and len(shape) <= 8 and all(map(_is_count, shape)), f"bad shape of {name}")
    part = _slice(sliced[0], tuple(shape), name) if sliced else None
    entry = ShardEntry(name, dtype, tuple(shape), start, count, part)
    sound = _is_count(start) and _is_count(count) and start + count <= entry.num_elements <= _MAX_ELEMENTS
    _demand(sound and (count > 0 or entry.num_elements == 0), f"bad elements of {name}")
    return entry


def _slice(value: Any, shape: tuple[int, ...], name: str) -> Slice:
    """Parse the result of `_slice_json` for a tensor of this shape. ValueError for anything else."""
    _demand(isinstance(value, list) and len(value) == 2 and isinstance(value[1], list), f"bad slice of {name}")
    dimension, ranges = value
    pairs = all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) for pair in ranges)
    _demand(_is_count(dimension) and pairs, f"bad slice of {name}")
    part = Slice(dimension, tuple((begin, end) for begin, end in ranges))
    _demand(part.fits(shape), f"bad slice of {name}")
    return part


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_ELEMENTS


def _is_record(value: Any, *keys: str) -> bool:
    return isinstance(value, dict) and tuple(value) == keys


def _demand(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


# --- Reading manifests: the checkpoints of a folder, and their contents. No torch
#
# A path names a checkpoint by its own folder, by a folder of checkpoints or a run (the newest one), or as RUN@STEP.

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # of a run folder
BASE = "base"  # key of a manifest: the base checkpoint of adapters
AT_STEP = re.compile(r"(.+)@([0-9]{1,18})")
_MAX_MANIFEST_BYTES = 1 << 30


class FoundManifest(NamedTuple):
    """The folder of a checkpoint, and its manifest."""

    path: Path
    manifest: Manifest


class FoundManifests(NamedTuple):
    """The checkpoints of a folder with a valid manifest, newest first, and the problems of the others."""

    valid: list[FoundManifest]
    refused: list[str]


def find_manifest(path: Path) -> FoundManifest:
    """Return the folder of the checkpoint that `path` names, and its manifest, without reading its shards.

    Raises CheckpointError if there is none.
    """
    if PUBLISHED.fullmatch(path.name) or (path / MANIFEST).is_file():
        return FoundManifest(path, read_manifest(path))
    step = None
    if not path.exists() and (named := AT_STEP.fullmatch(path.name)):
        path, step = path.with_name(named[1]), int(named[2])
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    candidates, refused = manifests(folder)
    wanted = [candidate for candidate in candidates if step in (None, candidate.manifest.step)]
    if wanted:
        return wanted[0]
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    of_step = "" if step is None else f" of step {step:,}"
    raise CheckpointError("\n".join([f"{path} holds no checkpoint{of_step}", *refused]))


def trained_tokens(meta: Mapping[str, Any]) -> int | None:
    """Return the tokens that a run had trained on when it wrote a manifest; None if not recorded."""
    position = meta.get("position")
    tokens = position.get("tokens") if isinstance(position, dict) else None
    return tokens if type(tokens) is int else None


def phase_of(meta: Mapping[str, Any]) -> int | None:
    """Return the number of the phase that wrote a manifest; None for a run without phases."""
    value = meta.get("plan")
    for key in ("train", "within", "number"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if type(value) is int else None


def base_of(path: Path, manifest: Manifest) -> FoundManifest | None:
    """Return the base checkpoint of a checkpoint of adapters, with its manifest; None if there are no adapters.

    Raises CheckpointError if the base is missing or has changed.
    """
    base = manifest.meta.get(BASE)
    if base is None:
        return None
    base_path, sha256 = (base.get(key) if isinstance(base, dict) else None for key in ("path", "sha256"))
    if not isinstance(base_path, str) or not isinstance(sha256, str):
        raise CheckpointError(f"{path / MANIFEST}: it does not name the base checkpoint of its adapters")
    folder = Path(os.path.normpath(path.absolute().parent / base_path))
    try:
        base_manifest = read_manifest(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{path} has adapters, and their base checkpoint cannot be used: {error}") from None
    if digest(base_manifest) != sha256:
        raise CheckpointError(f"{path} has adapters, and {printable(str(folder))} has other weights than theirs")
    return FoundManifest(folder, base_manifest)


def base_entry(base: Path, manifest: Manifest, folder: Path) -> dict[str, str]:
    """Return the entry of a manifest in `folder` that names the base checkpoint of its adapters, for `base_of`. The
    path is relative to `folder`, so that both may be moved together."""
    return {"path": os.path.relpath(base, folder), "sha256": digest(manifest)}


class ParsedManifests:
    """A cache of parsed manifests. A manifest is parsed again only if its file changes."""

    def __init__(self) -> None:
        self._manifests: dict[Path, tuple[object, Manifest]] = {}

    def read(self, path: Path) -> Manifest:
        """Return the manifest of a checkpoint. Raises CheckpointError."""
        identity, manifest = self._manifests.get(path, (None, None))
        if manifest is None or identity != _identity(path):
            manifest = read_manifest(path)
            self.add(path, manifest)
        return manifest

    def add(self, path: Path, manifest: Manifest) -> None:
        """Cache a manifest that this process has just written and verified."""
        self._manifests[path] = _identity(path), manifest

    def forget_all_but(self, paths: Collection[Path]) -> None:
        """Remove the manifests of other checkpoints. A manifest of a large model takes megabytes."""
        self._manifests = {path: cached for path, cached in self._manifests.items() if path in paths}


def _identity(path: Path) -> object:
    """Return a value that changes when the manifest of a checkpoint is written or replaced."""
    try:
        status = (path / MANIFEST).lstat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def manifests(folder: Path, parsed: ParsedManifests | None = None) -> FoundManifests:
    """Read the manifests of the checkpoints of a folder. Raises CheckpointError if the folder cannot be read."""
    checkpoints, refused, read = [], [], parsed.read if parsed is not None else read_manifest
    try:
        with files.open_folder(folder, follow=True) as opened:
            candidates = [name for name in files.names(opened) if PUBLISHED.fullmatch(name)]
    except FileNotFoundError:
        return FoundManifests([], [])
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    for name in candidates:
        try:
            checkpoints.append(FoundManifest(folder / name, read(folder / name)))
        except CheckpointError as error:
            refused.append(str(error))
    if parsed is not None:
        parsed.forget_all_but({checkpoint.path for checkpoint in checkpoints})
    valid = sorted(checkpoints, key=lambda candidate: candidate.manifest.serial, reverse=True)
    return FoundManifests(valid, refused)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises CheckpointError."""
    try:
        with files.open_folder(path) as folder, files.open_file(folder, MANIFEST) as file:
            size = files.file_size(file)
            if size > _MAX_MANIFEST_BYTES:
                raise ValueError(f"has {size} bytes")
            manifest = parse(bytes(files.read_exactly(file, 0, size)))
            if (named := PUBLISHED.fullmatch(path.name)) and int(named[1]) != manifest.step:
                raise ValueError(f"it is of step {manifest.step}")
            expected = {shard.file for shard in manifest.shards}
            foreign = [n for n in files.names(folder) if n.startswith("shard.") and n not in expected]
    except (OSError, ValueError, CheckpointError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{path / MANIFEST}: {problem}") from error
    if foreign:
        raise CheckpointError(f"{path / printable(foreign[0])}: does not belong to this checkpoint")
    return manifest

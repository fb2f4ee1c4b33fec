"""The tokenizer files next to a checkpoint, and those that `transformers` needs to load it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from compiler.files.text import TextFileError, read_bytes
from runtime.checkpoint.shard_manifest import CHECKPOINTS
from runtime.data import tokenizer_files
from runtime.data.tokenizer import END_TOKENS, MAX_FILE_BYTES
from runtime.data.tokenizer_files import CONFIG, GENERATION

NAME = tokenizer_files.TOKENIZER
FILES = (NAME, *tokenizer_files.BESIDE)  # in a published folder


def published_files(folder: Path) -> dict[str, bytes]:
    """The contents of the tokenizer files in a folder, regular files only; {} if it has no tokenizer.json."""
    files = {}
    for name in FILES:
        path = folder / name
        with suppress(TextFileError):
            files[name] = read_bytes(path, MAX_FILE_BYTES)
    return files if NAME in files else {}


def files_for(checkpoint: Path, digest: object, context: int) -> tuple[dict[str, bytes], int | None]:
    """The tokenizer files of a checkpoint and the id of its end-of-document token; ({}, None) if there are none.

    An imported checkpoint has them beside it. A run has them in its data, identified by `digest`, the sha256 of
    tokenizer.json in the checkpoint's manifest. Raises DataError if tokenizer_config.json is not JSON.
    """
    if isinstance(digest, str) and checkpoint.parent.name == CHECKPOINTS:
        for path in sorted((checkpoint.parent.parent / "data").glob(f"*/{NAME}")):
            content = b""
            with suppress(TextFileError):
                content = read_bytes(path, MAX_FILE_BYTES)
            if hashlib.sha256(content).hexdigest() == digest:
                return _add_default_config(path, content, context)
        return {}, None
    files = published_files(checkpoint.parent)
    return files, _end(checkpoint.with_name(NAME), files[NAME])[1] if files else None


def _add_default_config(path: Path, content: bytes, context: int) -> tuple[dict[str, bytes], int | None]:
    """The tokenizer files of a run, with a default tokenizer_config.json if it has none."""
    token, number = _end(path, content)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **({"eos_token": token} if token else {}),
    }
    written = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    files = {CONFIG: written, **published_files(path.parent)}
    if GENERATION in files and number is not None:
        files[GENERATION] = _ending(path, files[GENERATION], number)
    return files, number


def _ending(path: Path, content: bytes, number: int) -> bytes:
    """generation_config.json with the run's end-of-document id added to its end-of-text ids.

    `transformers` reads the end ids only there, and a base model fine-tuned for chat has another one.
    """
    ids = sorted(tokenizer_files.stops(path))
    if number in ids:
        return content
    return (json.dumps(json.loads(content) | {"eos_token_id": [*ids, number]}, indent=2) + "\n").encode()


def _end(path: Path, content: bytes) -> tuple[str, int | None]:
    """The end-of-document token and its id; ("", None) if there is none."""
    try:
        value = json.loads(content)
        vocabulary = {entry["content"]: entry["id"] for entry in value["added_tokens"]}
        inner = value["model"]["vocab"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", None
    vocabulary = {**(inner if isinstance(inner, Mapping) else {}), **vocabulary}
    configured = tokenizer_files.special_tokens(path).get("eos_token")
    token = next((candidate for candidate in (configured, *END_TOKENS) if candidate in vocabulary), None) or ""
    return token, vocabulary.get(token)

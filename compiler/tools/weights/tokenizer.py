"""The files of a tokenizer beside a checkpoint, and those by which `transformers` loads it."""

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
FILES = (NAME, *tokenizer_files.BESIDE)  # of a publication


def published_files(folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer that a published model has, those that are regular files."""
    found = {}
    for name in FILES:
        path = folder / name
        with suppress(TextFileError):
            found[name] = read_bytes(path, MAX_FILE_BYTES)
    return found if NAME in found else {}


def files_for(checkpoint: Path, digest: object, context: int) -> tuple[dict[str, bytes], int | None]:
    """The files of the tokenizer of a checkpoint, and the id that ends a document; nothing where there is none.

    An imported checkpoint has them beside it. A run has the tokenizer in its data, where its checkpoint names it by
    `digest`, the sha256 of its tokenizer.json. DataError for a tokenizer_config.json that is no JSON.
    """
    if isinstance(digest, str) and checkpoint.parent.name == CHECKPOINTS:
        for path in sorted((checkpoint.parent.parent / "data").glob(f"*/{NAME}")):
            content = b""
            with suppress(TextFileError):
                content = read_bytes(path, MAX_FILE_BYTES)
            if hashlib.sha256(content).hexdigest() == digest:
                return _configured(path, content, context)
        return {}, None
    found = published_files(checkpoint.parent)
    return found, _end(checkpoint.with_name(NAME), found[NAME])[1] if found else None


def _configured(path: Path, content: bytes, context: int) -> tuple[dict[str, bytes], int | None]:
    """The files of a run, and the configuration that names the class of a tokenizer where none does."""
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
    """generation_config.json with the id that ended the documents of the run among those that end a text.

    `transformers` reads the ids there alone, and a base model that was tuned to a chat has another.
    """
    ids = sorted(tokenizer_files.stops(path))
    if number in ids:
        return content
    return (json.dumps(json.loads(content) | {"eos_token_id": [*ids, number]}, indent=2) + "\n").encode()


def _end(path: Path, content: bytes) -> tuple[str, int | None]:
    """The token that ends a document, and its id."""
    try:
        value = json.loads(content)
        vocabulary = {each["content"]: each["id"] for each in value["added_tokens"]}
        inner = value["model"]["vocab"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", None
    vocabulary = {**(inner if isinstance(inner, Mapping) else {}), **vocabulary}
    named = tokenizer_files.special_tokens(path).get("eos_token")
    token = next((each for each in (named, *END_TOKENS) if each in vocabulary), None) or ""
    return token, vocabulary.get(token)

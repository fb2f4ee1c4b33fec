"""The files of a tokenizer: tokenizer.json, and what is published beside it.

A tokenizer.json does not say which token ends a document, or how a conversation is written. `eos_token` of
tokenizer_config.json, chat_template.jinja and generation_config.json do, so a run keeps them with its data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.data.files import DataError, MissingError, open_regular

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
GENERATION = "generation_config.json"
BESIDE = (CONFIG, "special_tokens_map.json", TEMPLATE, GENERATION)
MAX_BYTES = 64 << 20  # of one of these
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def beside(path: Path) -> dict[str, str]:
    """What lies beside a tokenizer.json, by the names of the files. DataError for a file that cannot be read."""
    return {name: read_text(path.with_name(name), MAX_BYTES) for name in BESIDE if path.with_name(name).is_file()}


def digest(files: Mapping[str, str]) -> str:
    """sha256 of files by their names."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()


def config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json beside a tokenizer.json; nothing where there is none. DataError if it is no JSON object."""
    return _object(path.with_name(CONFIG))


def special_tokens(path: Path) -> dict[str, str]:
    """The special tokens that tokenizer_config.json beside a tokenizer.json names: `eos_token` and others."""
    found = config(path)
    return {name: token for name in SPECIAL if (token := _token(found.get(name)))}


def stops(path: Path) -> frozenset[int]:
    """The ids at which generation_config.json beside a tokenizer.json ends a text."""
    ids = _object(path.with_name(GENERATION)).get("eos_token_id")
    return frozenset(each for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int)


def read_text(path: Path, most: int) -> str:
    """A file of UTF-8 of at most so many bytes. DataError for others."""
    try:
        with open_regular(path) as stream:
            content = stream.read(most + 1)
        if len(content) > most:
            raise DataError(f"{path}: larger than {most >> 20} MiB")
        return content.decode("utf-8")
    except OSError as error:
        kind = MissingError if isinstance(error, FileNotFoundError) else DataError
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8") from None


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_text(path, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected an object")
    return found


def _token(value: object) -> str | None:
    """The text of a special token, which may be an object with more."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None

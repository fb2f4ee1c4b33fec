"""The files of a tokenizer: tokenizer.json, and the files published with it.

A tokenizer.json does not define the token that ends a document, or the format of conversations. `eos_token` of
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


def read_side_files(path: Path) -> dict[str, str]:
    """Return the files next to a tokenizer.json by name. DataError if one cannot be read."""
    return {name: read_text(path.with_name(name), MAX_BYTES) for name in BESIDE if path.with_name(name).is_file()}


def digest(files: Mapping[str, str]) -> str:
    """Return the sha256 of files and their names."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()


def config(path: Path) -> dict[str, Any]:
    """Read tokenizer_config.json next to a tokenizer.json; empty if there is none. DataError if it is no JSON
    object."""
    return _object(path.with_name(CONFIG))


def special_tokens(path: Path) -> dict[str, str]:
    """Return the special tokens in tokenizer_config.json next to a tokenizer.json, such as `eos_token`."""
    entries = config(path)
    return {name: token for name in SPECIAL if (token := _token(entries.get(name)))}


def stops(path: Path) -> frozenset[int]:
    """Return the ids that end a text, from generation_config.json next to a tokenizer.json."""
    ids = _object(path.with_name(GENERATION)).get("eos_token_id")
    return frozenset(token_id for token_id in (ids if isinstance(ids, list) else [ids]) if type(token_id) is int)


def read_text(path: Path, max_bytes: int) -> str:
    """Read a UTF-8 file of at most `max_bytes` bytes. DataError if that fails."""
    try:
        with open_regular(path) as stream:
            content = stream.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise DataError(f"{path}: larger than {max_bytes >> 20} MiB")
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
        content = json.loads(read_text(path, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected an object")
    return content


def _token(value: object) -> str | None:
    """Return the text of a special token, which may be an object with further keys."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None

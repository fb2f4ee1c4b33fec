"""The files of a tokenizer beside a checkpoint, and those by which `transformers` loads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from runtime.checkpoint.manifest_file import CHECKPOINTS
from runtime.data.tokenizer import END_TOKENS

NAME, CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (NAME, CONFIG, "special_tokens_map.json", "chat_template.jinja", "generation_config.json")  # of a publication
MAX_BYTES = 256 << 20


def published_files(folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer that a published model has, those that are regular files."""
    found = {}
    for name in FILES:
        path = folder / name
        if path.is_file() and path.stat().st_size <= MAX_BYTES:
            found[name] = path.read_bytes()
    return found if NAME in found else {}


def files_for(checkpoint: Path, digest: object, context: int) -> tuple[dict[str, bytes], int | None]:
    """The files of the tokenizer of a checkpoint, and the id that ends a document; nothing where there is none.

    An imported checkpoint has them beside it. A run has the tokenizer in its data, where its checkpoint names it by
    `digest`, the sha256 of its tokenizer.json.
    """
    if isinstance(digest, str) and checkpoint.parent.name == CHECKPOINTS:
        for path in sorted((checkpoint.parent.parent / "data").glob(f"*/{NAME}")):
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == digest:
                return _configured(content, context)
        return {}, None
    found = published_files(checkpoint.parent)
    return found, _end(found[NAME])[1] if found else None


def _configured(content: bytes, context: int) -> tuple[dict[str, bytes], int | None]:
    """A tokenizer.json that dsc wrote, and the configuration that names its class."""
    token, number = _end(content)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **({"eos_token": token} if token else {}),
    }
    return {NAME: content, CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}, number


def _end(content: bytes) -> tuple[str, int | None]:
    """The token that ends a document, and its id."""
    try:
        value = json.loads(content)
        vocabulary = {each["content"]: each["id"] for each in value["added_tokens"]}
        inner = value["model"]["vocab"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", None
    vocabulary = {**(inner if isinstance(inner, Mapping) else {}), **vocabulary}
    token = next((each for each in END_TOKENS if each in vocabulary), "")
    return token, vocabulary.get(token)

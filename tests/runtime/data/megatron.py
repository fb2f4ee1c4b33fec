"""Files of token ids as Megatron-LM writes them, implemented independently: `IndexedDatasetBuilder` and `_IndexWriter`
of megatron/core/datasets/indexed_dataset.py, field by field."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "int32", modes: bytes | None = None
) -> None:
    """Write documents. Each is a list of sequences of ids."""
    lengths, pointers, indices, offset = [], [], [0], 0
    with prefix.with_name(prefix.name + ".bin").open("wb") as stream:
        for document in documents:
            for sequence in document:
                content = np.array(sequence, dtype=np.dtype(dtype)).tobytes(order="C")
                stream.write(content)
                lengths.append(len(sequence))
                pointers.append(offset)
                offset += len(content)
            indices.append(len(lengths))
    with prefix.with_name(prefix.name + ".idx").open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00")
        stream.write(struct.pack("<Q", 1))
        stream.write(struct.pack("<B", CODES[dtype]))
        stream.write(struct.pack("<Q", len(lengths)))
        stream.write(struct.pack("<Q", len(indices)))
        stream.write(struct.pack(f"<{len(lengths)}i", *lengths))
        stream.write(struct.pack(f"<{len(pointers)}q", *pointers))
        stream.write(struct.pack(f"<{len(indices)}q", *indices))
        stream.write(modes or b"")

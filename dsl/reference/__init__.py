"""Reference topics of the language: blocks, keys, words, units and codes, from the schema and other tables."""

from dsl.reference.keys import BlockKey, BlockKeys, blocks, keys, related_key_paths, without_kinds
from dsl.reference.topics import Topic, find, index, suggestions, text_of

__all__ = [
    "BlockKey",
    "BlockKeys",
    "Topic",
    "blocks",
    "find",
    "index",
    "keys",
    "related_key_paths",
    "suggestions",
    "text_of",
    "without_kinds",
]

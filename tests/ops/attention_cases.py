"""Random arguments of the ops of attention, of rotation, and of an indexer."""

from __future__ import annotations

from tests.ops.source import Args, Source, places


def mla_attention(
    source: Source,
    B: int = 2,
    S: int = 9,
    H: int = 3,
    nope: int = 6,
    rope: int = 4,
    value: int = 5,
    theta: float = 1e4,
    documents: bool = False,
    some: bool = False,
) -> Args:
    T, where = B * S, places(source, B, S, documents, some)
    queries = T if where[1] is None else len(where[1])
    tensors = source.normal(queries, H * (nope + rope)), source.normal(T, H * (nope + value)), source.normal(T, rope)
    return *tensors, S, H, nope, rope, value, 0.0 if some else theta, *where


def gqa_attention(
    source: Source,
    B: int = 2,
    S: int = 9,
    G: int = 2,
    r: int = 3,
    C: int = 4,
    theta: float = 1e4,
    documents: bool = False,
    some: bool = False,
) -> Args:
    T, where = B * S, places(source, B, S, documents, some)
    queries = T if where[1] is None else len(where[1])
    tensors = source.normal(queries, G * r * C), source.normal(T, G * C), source.normal(T, G * C)
    return *tensors, S, G * r, G, 0.0 if some else theta, *where


def bounded_attention(
    source: Source,
    B: int = 2,
    S: int = 9,
    G: int = 2,
    r: int = 3,
    C: int = 4,
    theta: float = 1e4,
    window: int = 4,
    softcap: float = 2.0,
    sinks: bool = True,
    documents: bool = False,
    some: bool = False,
) -> Args:
    *tensors, S, H, G, theta, begins, positions = gqa_attention(source, B, S, G, r, C, theta, documents, some)
    return *tensors, source.normal(H) if sinks else None, S, H, G, theta, window, softcap, begins, positions


def select_keys(
    source: Source,
    B: int = 2,
    S: int = 9,
    H: int = 3,
    C: int = 4,
    top_k: int = 3,
    rate: int = 1,
    documents: bool = False,
    some: bool = False,
) -> Args:
    where = places(source, B, S, documents, some)
    T = B * S if where[1] is None else len(where[1])
    tensors = source.normal(T, H * C), source.normal(B * (S // rate), C), source.normal(T, H)
    return *tensors, S, H, top_k, rate, *where


def rotate(
    source: Source,
    B: int = 2,
    S: int = 9,
    H: int = 3,
    first: int = 2,
    width: int = 6,
    behind: int = 1,
    original: float = 20.0,
    magnitude: float = 1.3,
    scale: float = 0.7,
    documents: bool = False,
    some: bool = False,
    stride: int = 1,
) -> Args:
    """Frequencies of 50^(−i/3): with `original` the second of three lies on the ramp, without it all do."""
    low, high = (0.5, 2.0) if original else (-0.5, 3.5)
    where = places(source, B, S, documents, some)
    x = source.normal(B * (S // abs(stride)) if where[1] is None else len(where[1]), H * (first + width + behind))
    how = 50.0, 8.0, low, high, original, magnitude, scale
    return x, S, H, first, width, *how, *where, stride

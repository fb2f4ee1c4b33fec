"""Random arguments for the ops of linear attention."""

from __future__ import annotations

from tests.runtime.ops.source import Args, Source, starts


def convolve(source: Source, B: int = 2, S: int = 9, N: int = 5, J: int = 4, documents: bool = False) -> Args:
    return source.normal(B * S, N), source.normal(N, J), S, starts(source, B, S) if documents else None


def log_decay(source: Source, T: int = 5, H: int = 3, W: int = 2) -> Args:
    return source.normal(T, H * W), source.normal(H)


def delta_rule(
    source: Source,
    B: int = 2,
    S: int = 9,
    G: int = 2,
    r: int = 2,
    K: int = 4,
    V: int = 3,
    channels: bool = True,
    documents: bool = False,
) -> Args:
    """Decays of about a half."""
    T, H = B * S, G * r
    keys = source.normal(T, G * K), source.normal(T, G * K)
    decay = -source.normal(T, H * K if channels else H).square()
    return *keys, source.normal(T, H * V), source.normal(T, H), decay, S, G, starts(source, B, S) if documents else None

"""The activation of a feed-forward part: the op between up and down, by name, and its constants."""

from __future__ import annotations

from typing import Any

from dsl.schema import Dense, Moe
from dsl.schema.model import is_gated

CLAMPED = "clamped_swiglu"


def activated(ops: Any, h_TM: Any, activation: str, limit: float, alpha: float, shift: float) -> Any:
    """act(gate)·up of the columns [gate | up], or act of each column."""
    if activation == CLAMPED:
        return ops.clamped_swiglu(h_TM, limit, alpha, shift)
    return getattr(ops, activation)(h_TM)


def times_gate(ops: Any, h_RM: Any, gate_R: Any, activation: str, limit: float, alpha: float, shift: float) -> Any:
    """The activation of each row times its gate weight: one op for SwiGLU."""
    if activation == "swiglu":
        return ops.gated_swiglu(h_RM, gate_R)
    return ops.gate_rows(activated(ops, h_RM, activation, limit, alpha, shift), gate_R)


def constants_of(ffn: Dense | Moe) -> dict[str, float | str]:
    """What a segment says of its activation and of its biases; nothing where that is a SwiGLU without any."""
    biased: dict[str, float | str] = {"biased": True} if ffn.bias else {}
    if ffn.clamp is not None:
        clamp = ffn.clamp
        return {"activation": CLAMPED, "limit": clamp.limit, "alpha": clamp.alpha, "shift": clamp.shift, **biased}
    return biased if ffn.activation == "swiglu" else {"activation": ffn.activation, **biased}


def up_parts(ffn: Dense | Moe, inner: int) -> tuple[int, ...]:
    """Columns of the product before the activation, which gives `inner`: of the gate, if it has one, and of up."""
    return (inner, inner) if is_gated(ffn) else (inner,)

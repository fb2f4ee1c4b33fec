"""Names of gradients and of gradient accumulators."""

from __future__ import annotations

_GRADIENT, _ACCUMULATOR = "d_", "g_"


def gradient_of(value: str) -> str:
    """The name of the gradient of a value: d_x."""
    return f"{_GRADIENT}{value}"


def is_gradient(name: str) -> bool:
    return name.startswith(_GRADIENT)


def value_of(name: str) -> str:
    """The value that a name is the gradient of."""
    assert is_gradient(name), name
    return name.removeprefix(_GRADIENT)


def accumulator_of(parameter: str) -> str:
    """The name of the gradient accumulator of a parameter: g_w."""
    return f"{_ACCUMULATOR}{parameter}"


def parameter_of(name: str) -> str:
    """The parameter of an accumulator's name. Other names are returned unchanged."""
    return name.removeprefix(_ACCUMULATOR)

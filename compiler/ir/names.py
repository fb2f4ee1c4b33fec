"""Names of values: of gradients, and of what the gradients of weights are added to."""

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
    """The name of what the gradients of a parameter are added to: g_w."""
    return f"{_ACCUMULATOR}{parameter}"


def parameter_of(name: str) -> str:
    """The parameter whose accumulator has a name; a name of anything else stays."""
    return name.removeprefix(_ACCUMULATOR)

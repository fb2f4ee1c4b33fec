"""What a plan predicts of the time of bodies and programs, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BodyTimes:
    """Predicted times of a body, and the share of its communication that is hidden under compute."""

    ms: float
    compute_ms: float
    communication_ms: float
    hidden: float


@dataclass(frozen=True)
class ProgramTimes:
    """Predicted share of the communication of a program that is hidden under compute."""

    hidden: float


@dataclass(frozen=True)
class Overlap:
    """Predicted times by the names of bodies and of programs."""

    bodies: Mapping[str, BodyTimes]
    programs: Mapping[str, ProgramTimes]

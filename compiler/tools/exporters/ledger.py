"""What an export to another system says of a spec, and what it does not: every value of the spec is accounted for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dsl.leaves import leaves
from dsl.schema import Spec

OFF = ("0", "false", "none", "[]")  # what is off is no loss where the other system does not have it
# Blocks whose values say what is computed. A value of another block says where, how fast, and what is kept of it.
COMPUTED = ("model", "precision", "train", "adapter", "recompute", "schedule", "parallel", "data")


@dataclass(frozen=True)
class Loss:
    """A value of a spec that the other system cannot be told, or is told otherwise."""

    path: str
    value: str
    why: str
    changes: bool  # whether what is computed, or the plan itself, becomes another


class Ledger:
    """The values of a spec that nothing has been said of yet, and those that are lost."""

    def __init__(self, spec: Spec) -> None:
        self._left = {leaf.path: leaf.text for leaf in leaves(spec)}
        self._losses: list[Loss] = []

    def say(self, *patterns: str) -> None:
        """Take note that the export says the values at these paths, where `*` is any part of a path."""
        for pattern in patterns:
            for path in self._matching(pattern):
                del self._left[path]

    def lose(self, pattern: str, why: str, *, changes: bool = True) -> None:
        """Take note that the export does not say the values at these paths. What is off, or not there, is no loss."""
        for path in self._matching(pattern):
            value = self._left.pop(path)
            if value not in OFF:
                self._losses.append(Loss(path, value, why, changes))

    def note(self, path: str, value: str, why: str, *, changes: bool = True) -> None:
        """Take note of a loss that is not at one path alone."""
        self._losses.append(Loss(path, value, why, changes))

    def losses(self, system: str) -> tuple[Loss, ...]:
        """All that is lost, what changes the computation first. What nothing was said of counts as lost."""
        unsaid = [
            Loss(path, text, f"this export to {system} has no word for it", path.partition(".")[0] in COMPUTED)
            for path, text in self._left.items()
        ]
        return tuple(sorted([*self._losses, *unsaid], key=lambda loss: not loss.changes))

    def _matching(self, pattern: str) -> list[str]:
        return [path for path in self._left if path == pattern or fnmatchcase(path, pattern)]


def comments(losses: Iterable[Loss]) -> list[str]:
    """A line for each loss: ASCII, printable, whatever the spec says."""
    return [
        plain(f"{'CHANGED' if loss.changes else 'note'}: {loss.path} = {loss.value}: {loss.why}") for loss in losses
    ]


def plain(text: str, most: int = 2000) -> str:
    """A text on one line of printable ASCII, of at most so many characters."""
    shown = text.encode("ascii", "backslashreplace").decode("ascii")
    shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
    return shown if len(shown) <= most else shown[: most - 3] + "..."

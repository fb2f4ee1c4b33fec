"""What segments keep of the tokens before: rows, and the states of a delta rule."""

from __future__ import annotations

from torch import Tensor

from runtime.ops.delta_rule import continued_delta_rule

STATES = 8  # that are kept: the last ones, as a draft that is refused is forgotten soon


class Rows:
    """A row for each token so far, in one tensor that grows. Rows of tokens that come again replace those before."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def put(self, start: int, new_TW: Tensor) -> Tensor:
        """Rows of tokens start … start + T -> all rows up to them [N, W], a view."""
        end = start + new_TW.shape[0]
        if self._rows is None or end > self._rows.shape[0]:
            grown = new_TW.new_empty((max(64, 2 * end), new_TW.shape[1]))
            if self._rows is not None:
                grown[:start] = self._rows[:start]
            self._rows = grown
        self._rows[start:end] = new_TW
        return self._rows[:end]


class States:
    """The states of a delta rule behind each of the last calls, and the rows of its arguments, from which it goes on
    where tokens are forgotten."""

    def __init__(self) -> None:
        self._rows = [Rows() for _ in range(5)]
        self._states: dict[int, Tensor] = {}  # by the number of tokens that they are behind

    def next(self, start: int, new: tuple[Tensor, ...], key_heads: int) -> Tensor:
        """The arguments of `delta_rule` of the tokens from `start` on -> o of these tokens [T, H·V]. Tokens between the
        last states and them are read again."""
        self._states = {end: state for end, state in self._states.items() if end <= start}
        begin = max(self._states, default=0)
        q, k, v, beta, decay = (rows.put(start, x)[begin:] for rows, x in zip(self._rows, new, strict=True))
        o, state = continued_delta_rule(q, k, v, beta, decay, key_heads, self._states.get(begin))
        self._states[begin + len(q)] = state
        for end in sorted(self._states)[:-STATES]:
            del self._states[end]
        return o[start - begin :]

"""What a user has to mend before a model can be evaluated or asked for text."""

from __future__ import annotations


class InferenceError(Exception):
    """A run, a checkpoint, a text or an option that cannot be used; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

"""Phases of a run: whether a phase starts from a checkpoint, is not reached yet, or is over.

The number of trained tokens decides, not that of steps, which differs from the spec if another batch size was used.
"""

from __future__ import annotations

from runtime.checkpoint.loading import LoadedCheckpoint
from runtime.checkpoint.shard_manifest import CheckpointError, phase_of, trained_tokens
from runtime.contract import RunPlan
from runtime.contract.rate import tokens_to_train


class EarlierPhaseError(CheckpointError):
    """The newest valid checkpoint has not reached the phase that should be trained."""


class PhaseOverError(CheckpointError):
    """The phase that should be trained is over, and another follows."""


def begins_with(checkpoint: LoadedCheckpoint, plan: RunPlan) -> bool:
    """Whether a phase starts from this checkpoint, because an earlier phase, or a run without phases, wrote it.

    EarlierPhaseError if the earlier phase has not ended.
    """
    if (within := plan.train.within) is None or within.number == 1:
        return False
    tokens = trained_tokens(checkpoint.meta)
    if tokens is None:  # an older version did not record it
        tokens = within.first_token if checkpoint.step >= within.first_step else 0
    if tokens < within.first_token:
        raise EarlierPhaseError(
            f"{checkpoint.path} has trained on {tokens:,} tokens, and phase {within.number} of {within.phases} begins "
            f"after {within.first_token:,}: continue with the previous phase"
        )
    number = phase_of(checkpoint.meta)
    return number is None or number < within.number


def check_is_not_over(checkpoint: LoadedCheckpoint, plan: RunPlan) -> None:
    """Raise PhaseOverError if the checkpoint is at the end of the phase or beyond."""
    within, tokens = plan.train.within, trained_tokens(checkpoint.meta)
    if within is None or within.is_last or tokens is None:
        return
    if tokens >= (end := within.first_token + tokens_to_train(plan)):
        raise PhaseOverError(
            f"phase {within.number} of {within.phases} ends after {end:,} tokens, and {checkpoint.path} has trained "
            f"on {tokens:,}: continue with the next phase"
        )


def later_phase_hint(checkpoint: LoadedCheckpoint, plan: RunPlan) -> str:
    """Return a hint if a later phase wrote the checkpoint than the spec has at its number of tokens, else ""."""
    number, within = phase_of(checkpoint.meta), plan.train.within
    if number is None or within is None or number <= within.number:
        return ""
    return (
        f". Phase {number} wrote it, but by the spec the run is still in phase {within.number}: restore the lengths of "
        f"the phases already trained, or move the checkpoints after phase {within.number} out of "
        f"{checkpoint.path.parent}"
    )

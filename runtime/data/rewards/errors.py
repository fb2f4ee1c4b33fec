"""What the user must mend about a reward: one exception, its message names the reward, the place and the edit."""

from runtime.system.outcome import ReportedError


class RewardError(ReportedError):
    """A reward gives no values. It ends the run."""

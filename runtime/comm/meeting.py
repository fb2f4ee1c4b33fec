"""How ranks come together before a channel is opened: each says in a store where it is, so who is missing is named.

A channel that is opened before all its ranks are there holds those that are, on GPUs for ever. So ranks first wait for
one another in the store by which they were started, and that wait ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from runtime.system.outcome import ReportedError


class MissingRankError(ReportedError):
    """Ranks did not come in time; the message names them, and what this rank waits in."""

    def __init__(self, missing: Sequence[int], timeout_s: float, what: str) -> None:
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        super().__init__(f"{who} did not come within {timeout_s:g} s: this rank waits in `{what}`", of_peer=True)
        self.missing = tuple(missing)


class Meeting:
    """The start of a world, as one of its ranks sees it: `arrive` at one thing after the other.

    All ranks make their meetings in the same order. `set_action`: is told what this rank waits in.
    """

    def __init__(
        self, store: dist.Store, rank: int, timeout_s: float, set_action: Callable[[str], None] = lambda _: None
    ) -> None:
        number = store.add(f"dsc/starts of rank {rank}", 1)
        self.store = dist.PrefixStore(f"dsc/start {number}", store)
        self._rank, self._timeout_s, self._set_action = rank, timeout_s, set_action

    def arrive(self, what: str, members: Sequence[int]) -> None:
        """Return when all members have arrived at `what`, a name that they use once. Raises MissingRankError.

        Three requests to the store and a wait, for whatever number of members.
        """
        self._set_action(what)
        self.store.set(f"at/{self._rank}", json.dumps([what, [*members]]))
        self.store.set(f"{what}/{self._rank}", "")
        if self.store.add(f"{what}/count", 1) == len(members):
            self.store.set(f"{what}/all", "")
        try:
            self.store.wait([f"{what}/all"], timedelta(seconds=self._timeout_s))
        except RuntimeError:  # of which the store's are
            if missing := self._missing(what, members, {what}):
                raise MissingRankError(missing, self._timeout_s, what) from None
            raise

    def _missing(self, what: str, members: Sequence[int], seen: set[str]) -> list[int]:
        """The members that keep the others waiting: where they themselves wait elsewhere, those that they wait for."""
        away = self._away(what, members)
        for rank in away:
            if self.store.check([f"at/{rank}"]):
                elsewhere, others = json.loads(self.store.get(f"at/{rank}"))
                if elsewhere not in seen and self._away(elsewhere, others):
                    return self._missing(elsewhere, others, seen | {elsewhere})
        return away

    def _away(self, what: str, members: Sequence[int]) -> list[int]:
        return [rank for rank in members if not self.store.check([f"{what}/{rank}"])]

"""A run in a few numbers: how fast it trained, which share of its time stays, and what the rest was lost to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.predict.planned_step import Planned
from compiler.tools.picture import labels
from compiler.tools.report.charts import column
from compiler.tools.report.lost_time import LostTime
from compiler.tools.report.report import Report
from compiler.tools.report.step_parts import described, planned_parts, spent

CAUSES = {"again": "trained again", "checkpoint": "checkpoints", "restart": "restarts", "other": "other"}


@dataclass(frozen=True)
class Summary:
    """What a run has come to, beside its plan. What its files do not say is None, or empty."""

    steps: int | None
    tokens: int | None
    tokens_per_s: float | None  # median of the steps
    mfu: float | None  # of causal attention, of the BF16 peak; None where a device has none
    lost: LostTime | None
    spent: Mapping[str, float]  # seconds of the steps by part, the mean of the ranks
    planned: Planned | None

    @property
    def planned_goodput(self) -> float | None:
        """The share that the plan expects beside failures."""
        found = self.planned.goodput if self.planned else None
        return found.share if found else None

    def to_json(self) -> dict[str, Any]:
        """The form `report` of docs/json.md, without the name and the page."""
        lost, planned = self.lost, self.planned
        mfu = planned.mfu.causal if planned and planned.mfu else None
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "goodput": lost.goodput if lost else None,
            "wall_s": lost.wall if lost else None,
            "lost_s": {cause: getattr(lost, cause) for cause in CAUSES} if lost else None,
            "spent_s": dict(self.spent),
            "planned": {
                "step_s": planned.seconds,
                "tokens_per_s": planned.tokens_per_second,
                "mfu": mfu,
                "goodput": self.planned_goodput,
                "spent_s": planned_parts(planned),
            }
            if planned
            else None,
        }

    def lines(self) -> Sequence[str]:
        """What the terminal says at the end of a run."""
        speed = [f"{self.steps:,} steps"] if self.steps is not None else []
        speed += [f"{labels.number(self.tokens_per_s)} tokens/s"] if self.tokens_per_s else []
        speed += [f"MFU {self.mfu:.1%}"] if self.mfu is not None else []
        said = [f"speed: {', '.join(speed)}"] if speed else []
        if self.spent and sum(self.spent.values()):
            said.append(f"time: {described(self.spent)}")
        return said + [
            f"{name.partition(',')[0]}: {text}" for name, text in self.facts() if name != "time of the steps"
        ]

    def facts(self) -> Sequence[tuple[str, str]]:
        """What the page says of the time of the run."""
        facts = []
        if self.lost is not None:
            planned = self.planned_goodput
            beside = f"; {planned:.1%} planned beside failures" if planned is not None else ""
            facts.append(("goodput, measured", f"{self.lost.goodput:.1%} of {self.lost.wall:,.1f} s{beside}"))
            parts = {name: getattr(self.lost, cause) for cause, name in CAUSES.items()}
            if lost := ", ".join(f"{name} {value:.1f} s" for name, value in parts.items() if value >= 0.05):
                facts.append(("time lost", lost))
        if self.spent and sum(self.spent.values()):
            facts.append(("time of the steps", described(self.spent)))
        return facts


def summary_of(report: Report) -> Summary | None:
    """The numbers of a run; None of a build that was not run."""
    run, planned = report.run, report.planned
    if run is None:
        return None
    steps, tokens = column(run.metrics, "step"), column(run.metrics, "tokens")
    speeds = [value for _, value in column(run.metrics, "tokens_per_s")]
    speed = statistics.median(speeds) if speeds else None
    mfu = None
    if speed is not None and planned and planned.mfu:  # FLOPs of a token and the peak are those of the plan
        mfu = planned.mfu.causal * speed / planned.step.tokens_per_second
    return Summary(
        steps=int(steps[-1][1]) if steps else None,
        tokens=int(tokens[-1][1]) if tokens else None,
        tokens_per_s=speed,
        mfu=mfu,
        lost=run.lost,
        spent=spent(run.metrics),
        planned=planned,
    )

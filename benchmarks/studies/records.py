"""What is kept of the runs of a study: curves as means over windows of steps, in one JSON file a study."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from benchmarks.studies.study import ROOT, Run, Study, Variant, tenth, window_of

Curve = list[float]


@dataclass(frozen=True)
class Record:
    """A run that came to its end.

    `digest`: of its spec. `loss`, nats a token, and `imbalance`, by layer the load of the busiest expert over the mean,
    are means over windows of steps. `loads`: by layer, the tokens that each expert received in the last tenth of the
    steps. `validation_loss` is that of the end, nats a token.
    """

    variant: str
    seed: int
    digest: str
    loss: Curve
    validation_loss: float | None
    imbalance: Mapping[str, Curve]
    loads: Mapping[str, list[int]]

    @property
    def last_loss(self) -> float:
        """Mean loss of the last tenth of the steps, nats a token."""
        return last(self.loss)


@dataclass
class Results:
    """All runs of a study by their names, and why variants have none."""

    study: str
    steps: int
    about: dict[str, str]
    runs: dict[str, Record] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def of(self, variant: Variant) -> list[Record]:
        """Records of a variant, by seed."""
        found = [record for record in self.runs.values() if record.variant == variant.name]
        return sorted(found, key=lambda record: record.seed)

    def layers(self) -> list[str]:
        """Names of the layers that have experts."""
        return list(next(iter(self.runs.values())).imbalance)


def last(curve: Sequence[float]) -> float:
    """Mean of the last tenth of a curve."""
    return statistics.fmean(curve[-tenth(len(curve)) :])


def results_path(study: Study) -> Path:
    """The file that a study's results are kept in."""
    return ROOT / "benchmarks" / "results" / f"{study.name}.json"


def read_results(path: Path, study: Study) -> Results:
    """Results that are kept for these variants and seeds; an empty value where there is no file."""
    results = Results(study.name, study.steps, about())
    if path.exists():
        found = json.loads(path.read_text("utf-8"))
        results.about = found["about"]
        names = {run.name for run in study.runs()}
        results.runs = {name: Record(**record) for name, record in found["runs"].items() if name in names}
        variants = {variant.name for variant in study.variants}
        results.refused = {name: why for name, why in found["refused"].items() if name in variants}
    return results


def write_results(path: Path, results: Results) -> None:
    """Replace the file as a whole: a study that is killed leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results.runs = dict(sorted(results.runs.items()))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(_json(results), "utf-8")
    temporary.replace(path)


def _json(results: Results) -> str:
    """One line a run, so that a difference of two versions says which runs are new."""
    head = json.dumps({key: value for key, value in asdict(results).items() if key != "runs"})
    runs = ",\n".join(f" {json.dumps(name)}: {json.dumps(asdict(run))}" for name, run in results.runs.items())
    return f'{head[:-1]},\n"runs": {{\n{runs}\n}}}}\n'


def about() -> dict[str, str]:
    """The day, the processor, and the versions of what computes."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    processors = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processors[0] if processors else platform.machine(),
        "python": platform.python_version(),
        "torch": metadata.version("torch").partition("+")[0],
    }


def record_of(run: Run, digest: str, folder: Path) -> Record:
    """Read what a run left in its folder when it came to its end."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    window = window_of(len(rows))
    validations = [row["validation_loss"] for row in rows if "validation_loss" in row]
    layers = list(rows[0].get("layer_imbalance", {}))
    return Record(
        variant=run.variant.name,
        seed=run.seed,
        digest=digest,
        loss=_means([row["loss"] for row in rows], window),
        validation_loss=validations[-1] if validations else None,
        imbalance={name: _means([row["layer_imbalance"][name] for row in rows], window) for name in layers},
        loads=_last_loads(folder, len(rows)),
    )


def _means(values: Sequence[float], window: int) -> Curve:
    return [round(statistics.fmean(values[at : at + window]), 6) for at in range(0, len(values), window)]


def _last_loads(folder: Path, steps: int) -> dict[str, list[int]]:
    """By layer, tokens of each expert in the last tenth: checkpoints have those since the first step."""
    before, after = (_checkpoint_loads(folder, step) for step in (steps - tenth(steps), steps))
    return {name: [b - a for a, b in zip(before[name], load, strict=True)] for name, load in after.items()}


def _checkpoint_loads(folder: Path, step: int) -> dict[str, list[int]]:
    manifest = folder / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    found: dict[str, list[int]] = json.loads(manifest.read_text("utf-8"))["meta"]["loads"]
    return found

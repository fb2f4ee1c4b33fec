"""The Prometheus series of a run: one table for the endpoint, the dashboard and the alert rules.

Names follow Prometheus' conventions (https://prometheus.io/docs/practices/naming/): base units at the end, `_total` for
counters, `_ratio` for shares from 0 to 1, `_info` for text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from runtime.observe.watch.run_state import RunState, seconds_of

Kind = Literal["gauge", "counter"]
Sample = tuple[tuple[str, ...], float]  # values of the labels, and the number


class Series(NamedTuple):
    """A metric family. `name`: the scraped name; `labels`: besides `run`; `group`: the row of the dashboard; `title`,
    `unit`: of its panel."""

    name: str
    kind: Kind
    help: str
    group: str
    title: str
    unit: str  # of Grafana
    read: Callable[[RunState], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def _sample_without_labels(read: Callable[[RunState], float | None]) -> Callable[[RunState], Iterator[Sample]]:
    """Return the samples of a series without labels, which is left out while its number is unknown."""

    def samples(state: RunState) -> Iterator[Sample]:
        if (value := read(state)) is not None:
            yield (), float(value)

    return samples


def _row_value(name: str) -> Callable[[RunState], Iterator[Sample]]:
    return _sample_without_labels(lambda state: state.number(name))


def _count(event: str) -> Callable[[RunState], Iterator[Sample]]:
    return _sample_without_labels(lambda state: state.counts[event])


def _labelled_samples(read: Callable[[RunState], Mapping[Any, float]]) -> Callable[[RunState], list[Sample]]:
    """Return the samples of a series with a label for each key."""
    return lambda state: [(key if isinstance(key, tuple) else (str(key),), float(n)) for key, n in read(state).items()]


def _prediction(read: Callable[[Any], float | None]) -> Callable[[RunState], Iterator[Sample]]:
    return _sample_without_labels(lambda state: read(state.forecast) if state.forecast else None)


def _prediction_by_rank(read: Callable[[Any], Iterable[int]]) -> Callable[[RunState], list[Sample]]:
    return _labelled_samples(lambda state: dict(enumerate(read(state.forecast))) if state.forecast else {})


def _is_finite(state: RunState) -> float | None:
    numbers = [state.number(name) for name in ("loss", "grad_norm") if name in state.row]
    return float(all(number is not None and math.isfinite(number) for number in numbers)) if numbers else None


def _stragglers(state: RunState) -> dict[tuple[str, ...], float]:
    """Return the factors of slow ranks by rank, host and part."""
    return {
        (str(rank), str(event.get("host", "")), str(event.get("part", ""))): factor
        for rank, event in state.stragglers.items()
        if isinstance(factor := event.get("factor"), float)
    }


def _device_faults(state: RunState) -> dict[tuple[str, ...], float]:
    """Return 1 for each kind of fault of a rank's device."""
    return {
        (str(rank), str(event.get("device")), str(fault["kind"])): 1.0
        for rank, event in state.devices.items()
        for fault in event.get("faults") or ()
    }


def _device_fact(name: str) -> Callable[[RunState], list[Sample]]:
    """Return the samples of a number in the last event of each device."""
    return _labelled_samples(
        lambda state: {
            (str(rank), str(event.get("device"))): float(event["facts"][name])
            for rank, event in state.devices.items()
            if name in (event.get("facts") or ())
        }
    )


def _info(state: RunState) -> list[Sample]:
    if not (state.start or state.forecast):
        return []
    forecast, start = state.forecast, state.start
    words = (forecast.model, forecast.cluster) if forecast else ("", "")
    return [((*words, str(start.get("device", "")), str(start.get("build", ""))[:12]), 1.0)]


def _last_sign_s(state: RunState) -> float | None:
    """Return the time of the last row or start: the last row of a resumed run may be days old."""
    times = (seconds_of(row.get("time")) for row in (state.row, state.start))
    return max((time_s for time_s in times if time_s is not None), default=None)


TRAINING, SPEED, TIME = "Training", "Speed", "Where the time goes"
DEVICES, LINKS, EXPERTS, SAVES = "Devices", "Links", "Experts", "Saves and failures"

SERIES: tuple[Series, ...] = (
    Series("dsc_run_info", "gauge", "What is trained, as labels; always 1.", TRAINING, "Run", "short", _info,
           ("model", "cluster", "device", "build")),
    Series("dsc_step", "gauge", "Steps that were trained.", TRAINING, "Step", "short",
           _sample_without_labels(lambda s: s.row.get("step"))),
    Series("dsc_last_step", "gauge", "Step with which the run or its phase ends.", TRAINING, "Last step", "short",
           _sample_without_labels(lambda s: s.last_step)),
    Series("dsc_phase", "gauge", "Number of the phase that is trained, from 1.", TRAINING, "Phase", "short",
           _prediction(lambda forecast: forecast.phase)),
    Series("dsc_phases", "gauge", "Number of phases of the run.", TRAINING, "Phases", "short",
           _prediction(lambda forecast: forecast.phases)),
    Series("dsc_loss", "gauge", "Loss of the last step, in nats.", TRAINING, "Loss", "short", _row_value("loss")),
    Series("dsc_validation_loss", "gauge", "Loss of the last validation, in nats.", TRAINING, "Validation loss",
           "short", _sample_without_labels(lambda s: s.validation.loss if s.validation else None)),
    Series("dsc_gradient_norm", "gauge", "Norm of the gradients of the last step.", TRAINING, "Gradient norm", "short",
           _row_value("grad_norm")),
    Series("dsc_learning_rate", "gauge", "Learning rate of the last step.", TRAINING, "Learning rate", "sci",
           _row_value("rate")),
    Series("dsc_reward", "gauge", "Mean reward of the completions of the last step.", TRAINING, "Reward", "short",
           _row_value("reward")),
    Series("dsc_completion_tokens", "gauge", "Mean tokens of the completions of the last step.", TRAINING,
           "Tokens of a completion", "short", _row_value("completion_tokens")),
    Series("dsc_entropy", "gauge", "Mean entropy of the distributions that tokens are sampled from, in nats.",
           TRAINING,
           "Entropy", "short", _row_value("entropy")),
    Series("dsc_finite", "gauge", "1 if loss and gradient norm of the last step are finite, else 0.", TRAINING,
           "Numbers are finite", "bool", _sample_without_labels(_is_finite)),
    Series("dsc_seen_tokens", "gauge", "Tokens that the weights of the last step were trained on.", TRAINING,
           "Tokens seen", "short", _row_value("tokens")),
    Series("dsc_trained_tokens_total", "counter", "Tokens of all steps of this start, discarded ones too.", SPEED,
           "Tokens per second", "short", _sample_without_labels(lambda s: s.trained_tokens)),
    Series("dsc_tokens_per_second", "gauge", "Tokens per second of the last step.", SPEED,
           "Tokens per second of a step", "short", _row_value("tokens_per_s")),
    Series("dsc_step_duration_seconds", "gauge", "Time of the last step.", SPEED, "Step", "s", _row_value("step_s")),
    Series("dsc_predicted_step_duration_seconds", "gauge", "Predicted time of a step, if the plan is calibrated.",
           SPEED,
           "Step, planned", "s", _prediction(lambda f: f.step_s if f.calibrated else None)),
    Series("dsc_remaining_seconds", "gauge", "Time to the last step at the pace of the last steps.", SPEED,
           "Time left", "s", _sample_without_labels(lambda s: s.left_s)),
    Series("dsc_spent_seconds_total", "counter",
           "Time of all steps of this start on the mean rank, by part (docs/json.md).", TIME, "Share of the time",
            "percentunit", _labelled_samples(lambda s: s.spent_s), ("part",)),
    Series("dsc_message_wait_ratio", "gauge",
           "Share of the last steps in which the mean rank waited for pipeline messages, including the bubble.",
           TIME, "Waiting in the pipeline", "percentunit", _sample_without_labels(lambda s: s.shares.get("message"))),
    Series("dsc_predicted_bubble_ratio", "gauge", "Predicted share of a step that the mean rank idles in the pipeline.",
           TIME, "Bubble, planned", "percentunit", _prediction(lambda f: f.bubble)),
    Series("dsc_mfu_ratio", "gauge", "Share of the BF16 peak of all devices, with masked attention.", DEVICES, "MFU",
           "percentunit", _sample_without_labels(lambda s: s.mfu)),
    Series("dsc_predicted_mfu_ratio", "gauge", "Predicted MFU.", DEVICES, "MFU, planned", "percentunit",
           _prediction(lambda f: f.mfu)),
    Series("dsc_device_use_ratio", "gauge", "Share of the last steps in which the mean rank computed.", DEVICES,
           "Device use", "percentunit", _sample_without_labels(lambda s: s.shares.get("compute"))),
    Series("dsc_memory_bytes", "gauge", "Peak bytes of tensors on the fullest device.", DEVICES,
           "Memory of the fullest device", "bytes", _row_value("memory_bytes")),
    Series("dsc_reserved_memory_bytes", "gauge", "Peak bytes that torch's allocator reserved on the fullest device.",
           DEVICES, "Memory reserved", "bytes", _row_value("reserved_bytes")),
    Series("dsc_process_memory_bytes", "gauge",
           "Peak bytes of the largest process of a rank on CPUs, with Python and its libraries.", DEVICES,
           "Memory of the largest process", "bytes", _row_value("process_bytes")),
    Series("dsc_predicted_memory_bytes", "gauge", "Predicted peak bytes of tensors on a device of a pipeline rank.",
           DEVICES, "Memory, planned", "bytes", _prediction_by_rank(lambda f: f.memory_bytes), ("pp_rank",)),
    Series("dsc_memory_capacity_bytes", "gauge", "Memory of a device of a pipeline rank.", DEVICES, "Memory capacity",
           "bytes", _prediction_by_rank(lambda f: f.capacity_bytes), ("pp_rank",)),
    Series("dsc_device_fault", "gauge", "1 for each kind of fault of a device, as its driver tells.", DEVICES,
           "Faults of devices", "short", _labelled_samples(_device_faults), ("rank", "gpu", "kind")),
    Series("dsc_device_temperature_celsius", "gauge", "Temperature of a device when its faults last changed.", DEVICES,
           "Temperature", "celsius", _device_fact("celsius"), ("rank", "gpu")),
    Series("dsc_device_uncorrected_errors", "gauge",
           "Uncorrected memory errors of a device when its faults last changed.", DEVICES, "Memory errors", "short",
           _device_fact("uncorrected"), ("rank", "gpu")),
    Series("dsc_link_bytes_total", "counter",
           "Planned bytes of all steps of this start over all links of a class, by purpose, with balanced experts.",
           LINKS,
           "Traffic, by plan", "Bps", _labelled_samples(lambda s: s.link_bytes), ("level", "purpose")),
    Series("dsc_expert_load_ratio", "gauge", "Tokens of the busiest expert of a layer over the mean.", EXPERTS,
           "Busiest expert over the mean", "short", _labelled_samples(lambda s: s.layers), ("layer",)),
    Series("dsc_saves_total", "counter", "Checkpoints that were published.", SAVES, "Saves", "short", _count("save")),
    Series("dsc_save_failures_total", "counter", "Checkpoints that could not be published.", SAVES, "Failed saves",
           "short", _count("save_failed")),
    Series("dsc_copy_failures_total", "counter", "Copies of checkpoints that failed.", SAVES, "Failed copies", "short",
           _count("copy_failed")),
    Series("dsc_failing_copy_places", "gauge", "Places that the newest checkpoint was not copied to.", SAVES,
           "Places without a copy", "short", _sample_without_labels(lambda s: len(s.failing) if s.row else None)),
    Series("dsc_saved_step", "gauge", "Step of the newest checkpoint.", SAVES, "Step saved", "short",
           _sample_without_labels(lambda s: s.save.get("step") if s.save else None)),
    Series("dsc_save_duration_seconds", "gauge", "Time for which training waited for the newest save.", SAVES,
           "Time of a save", "s", _sample_without_labels(lambda s: s.save.get("seconds") if s.save else None)),
    Series("dsc_bad_steps_total", "counter", "Steps with a bad loss or gradient norm, which changed no weights.",
           SAVES, "Bad steps",
           "short", _count("bad_step")),
    Series("dsc_straggler_ratio", "gauge",
           "Time of a slow rank over that of ranks with the same work; missing for other ranks.", SAVES, "Slow ranks",
           "short", _labelled_samples(_stragglers), ("rank", "host", "part")),
    Series("dsc_restarts_total", "counter", "Starts after a failure.", SAVES, "Restarts", "short", _count("restart")),
    Series("dsc_running", "gauge", "1 while the run trains; the endpoint ends with the run.", SAVES, "Running", "bool",
           _sample_without_labels(lambda s: float(s.end is None))),
    Series("dsc_last_row_timestamp_seconds", "gauge", 
           "When the last step ended, or the run was started if that is later, since 1970.", SAVES,
           "Time since the last step", "s", _sample_without_labels(_last_sign_s)),
)  # fmt: skip

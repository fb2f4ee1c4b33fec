"""A prediction as the JSON document of docs/json.md, with null for unknown values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from compiler.predict.prediction import (
    DeviceMemory,
    OrderGain,
    Prediction,
    RankMemory,
    RankTime,
    RankUse,
    StepPrediction,
    WhatIf,
)
from compiler.predict.why_shown import Misfit, edits_document, nearest_document

VERSION = 1


def document(prediction: Prediction, misfit: Misfit | None = None, what_if: WhatIf | None = None) -> dict[str, Any]:
    """The document of a prediction. `misfit`: the reason why the plan does not fit, and the edits that
    make it fit; None if it fits. `what_if`: what was asked for besides, or None.

    Times are in seconds, memory in bytes, money in USD, and shares from 0 to 1. Pipeline ranks and stages count from 0.
    """
    p = prediction
    return {
        "version": VERSION,
        "run": p.run,
        "model": p.model,
        "cluster": {"name": p.cluster, "devices": p.num_devices, "device": p.device},
        "parallel": dict(p.degrees),
        "placement": str(p.stage_placement),
        "parameters": {
            "total": p.parameters,
            "active": p.active_parameters,
            "mtp": p.mtp_parameters,
            "adapters": p.adapter_parameters,
        },
        "flops_per_token": asdict(p.flops),
        "step": _step(p.step),
        "mfu": asdict(p.mfu) if p.mfu else {"causal": None, "full": None},
        "tokens_per_second": p.step.tokens_per_second,
        "device_hours_per_trillion_tokens": p.device_hours_per_trillion_tokens,
        "cost": {
            "usd_per_device_hour": p.money.usd_per_device_hour,
            "usd_per_trillion_tokens": p.money.usd_per_trillion_tokens,
            "usd": p.money.usd,
        },
        "energy": {"watts_per_device": p.energy.watts, "kwh_per_trillion_tokens": p.energy.kwh_per_trillion_tokens},
        "whole_run": {"tokens": p.whole_run.tokens, "steps": p.whole_run.steps, "seconds": p.whole_run.seconds},
        "goodput": _goodput(p),
        "generation": {**asdict(p.generation), "share": p.generation_share} if p.generation else None,
        "order": _order(p.order_gain),
        "use": _use(p.use),
        "memory": _memory(p),
        "edits": edits_document(misfit),
        "nearest": nearest_document(misfit),
        "what_if": None if what_if is None else _what_if(what_if, p.step.seconds),
        "stages": [
            {
                "stage": row.stage,
                "ranks": list(row.ranks),
                "layers": list(row.layers),
                "others": list(row.other_blocks),
                "compute_s": row.compute_s,
                "exchange_s": row.exchange_s,
                "parameters": row.parameters,
            }
            for row in p.stages
        ],
        "exchange": asdict(p.exchange) if p.exchange else None,
        "rates": p.rates,
        "calibrated": p.calibrated,
        "torch": [asdict(share) for share in p.torch],
        "assumptions": list(p.assumptions),
    }


def _order(gain: OrderGain | None) -> dict[str, Any] | None:
    return None if gain is None else {**asdict(gain), "saved": gain.saved_share}


def document_of_phases(documents: Sequence[dict[str, Any]], phases: Sequence[Prediction]) -> dict[str, Any]:
    """The documents of the phases of a run, and their totals."""
    usd = [phase.money.usd for phase in phases if phase.money.usd is not None]
    return {
        "version": VERSION,
        "phases": list(documents),
        "total": {
            "tokens": sum(phase.whole_run.tokens for phase in phases),
            "steps": sum(phase.whole_run.steps for phase in phases),
            "seconds": sum(phase.whole_run.seconds for phase in phases),
            "device_hours": sum(phase.device_hours for phase in phases),
            "usd": sum(usd) if len(usd) == len(phases) else None,
            "fits": all(phase.fits for phase in phases),
        },
    }


def _step(step: StepPrediction) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "tokens": step.tokens,
        **_seconds_by_kind(step.first_rank),
        **_interval(step),
        "bound_s": step.bound_s,
        "schedule": step.schedule,
        "micro_batches": step.num_micro_batches,
        "reduction_s": step.tail.reduction_s,
        "gather_s": step.tail.gather_s,
        "norm_s": step.tail.norm_s,
        "update_s": step.tail.update_s,
        "host_s": step.tail.host_s,
        "mean": _seconds_by_kind(step.mean),
        "ranks": [{"pp_rank": rank.pp_rank, **_seconds_by_kind(rank)} for rank in step.ranks],
    }


def _interval(step: StepPrediction) -> dict[str, Any]:
    if step.interval is None:
        return {"low_s": None, "high_s": None, "confidence": None, "causes": []}
    return asdict(step.interval)


def _use(use: RankUse) -> dict[str, Any]:
    return {
        "pp_rank": use.pp_rank,
        "compute": {kind: time.seconds for kind, time in use.classes.items()},
        "communication": [{"axis": axis.axis, "busy_s": axis.busy_s, "exposed_s": axis.exposed_s} for axis in use.axes],
    }


def _what_if(what_if: WhatIf, step_s: float) -> dict[str, Any]:
    return {
        "loads": [
            {"load": e.load, "quantile": e.quantile, "step_s": e.seconds, "change": e.seconds / step_s - 1}
            for e in what_if.loads
        ],
        "changes": [
            {
                "settings": [{"key": key, "value": value} for key, value in change.settings],
                "step_s": change.seconds,
                "change": change.seconds / step_s - 1,
                "free_bytes": change.free_bytes,
                "exact": change.is_exact,
            }
            for change in what_if.changes
        ],
    }


def _seconds_by_kind(rank: RankTime) -> dict[str, float]:
    fields = ("forward_s", "backward_s", "weight_s", "overlapped_s", "bubble_s", "optimizer_s")
    return {field: getattr(rank, field) for field in fields}


def _goodput(prediction: Prediction) -> dict[str, Any] | None:
    goodput = prediction.goodput
    if goodput is None:
        return None
    seconds = (
        prediction.whole_run.seconds / goodput.share if goodput.share else None
    )  # of the whole run, with the time lost to failures
    return asdict(goodput) | {"share": goodput.share, "seconds": seconds}


def _memory(prediction: Prediction) -> dict[str, Any]:
    devices = prediction.devices_memory or (None,) * len(prediction.ranks)
    fullest_rank = min(prediction.ranks, key=lambda rank: rank.free_bytes)
    return {
        "capacity_bytes": fullest_rank.capacity_bytes,
        "peak_bytes": fullest_rank.peak_bytes,
        "fits": prediction.fits,
        "verdict": prediction.verdict,
        "host_bytes_per_node": prediction.host_bytes,
        "ranks": [
            {**_rank(rank), "device": _device(device)} for rank, device in zip(prediction.ranks, devices, strict=True)
        ],
    }


def _device(device: DeviceMemory | None) -> dict[str, Any] | None:
    if device is None:
        return None
    return {
        "memory_bytes": device.memory_bytes,
        "low_bytes": device.low_bytes,
        "high_bytes": device.high_bytes,
        "besides": [{"name": term.name, "low_bytes": term.low, "high_bytes": term.high} for term in device.terms],
    }


def _rank(rank: RankMemory) -> dict[str, Any]:
    keys = ("pp_rank", "capacity_bytes", "peak_bytes", "weights", "gradients", "optimizer", "activations", "buffers")
    return {
        **{key: getattr(rank, key) for key in keys},
        "peak_action": rank.peak_action,
        "worst_bytes": rank.worst_bytes,
        "worst_action": rank.worst_action,
        "host_bytes": rank.host_bytes,
        "held": [asdict(tensor) for tensor in rank.held_tensors],
    }

"""What a device has, and whether the run fits: streaming multiprocessors, memory, held-out data."""

from __future__ import annotations

from collections.abc import Iterator

from dsl import memory
from dsl.rules.finding import Finding
from dsl.schema import Spec
from dsl.stages import is_mirrored

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))


def compute_keeps_sms(spec: Spec) -> Iterator[Finding]:
    """Communication takes some of the SMs of a device that has them."""
    device, communication = spec.cluster.node.device, spec.sm.communication
    if device.sms is None and communication:
        message = f"communication = {communication} SMs, but device {device.name} states no sms"
        hint = "write `communication = 0`, or give the device its `sms`"
        yield Finding("E0914", message, "sm.communication", hint, (("the device", "cluster.node.device"),))
    elif device.sms is not None and communication >= device.sms:
        message = f"communication = {communication} of {device.sms} SMs leaves none to compute"
        hint = f"write `communication = {min(20, device.sms - 1)}`"
        yield Finding("E0907", message, "sm.communication", hint, (("the device", "cluster.node.device.sms"),))


def state_fits(spec: Spec) -> Iterator[Finding]:
    """A device holds at least its weights, their gradients and the optimizer's state: a bound in closed form."""
    device = spec.cluster.node.device
    least = memory.lower_bound(spec)
    if least.total <= device.memory:
        return
    mirrored = f"weights (two copies, as {spec.schedule.name} keeps)"
    weights = mirrored if is_mirrored(spec) else "weights"
    parts = (
        f"{weights} {size(least.weights)}, gradients {size(least.gradients)}, optimizer {size(least.optimizer)}, "
        f"one activation {size(least.activations)}"
    )
    message = f"device {device.name} has {size(device.memory)}, but the fullest holds {size(least.total)}: {parts}"
    zero = "zero = 1, " if spec.parallel.zero == 0 else ""
    hint = f"plan with {zero}more pipeline or expert ranks, more devices, or larger ones"
    notes = (("the model", "model"),)
    yield Finding("E0812", message, "cluster.node.device.memory", hint, notes)


def size(num_bytes: int) -> str:
    """Bytes to three digits or more, in the unit of a specification sheet."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS if num_bytes >= scale), (" bytes", 1))
    digits = 0 if scale == 1 or num_bytes >= 100 * scale else 1
    return f"{num_bytes / scale:,.{digits}f}{unit}"


def validation_has_data(spec: Spec) -> Iterator[Finding]:
    """A held-out loss is of files that were held out."""
    if spec.train.validate is not None and spec.data.validation == 0:
        message = "the run validates, but validation = 0% of the files are held out"
        note = ("it validates here", "train.validate")
        yield Finding("E0915", message, "data.validation", "write `validation = 1%`", (note,))

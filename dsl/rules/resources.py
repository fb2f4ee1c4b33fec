"""What a device has, and whether the run fits: streaming multiprocessors, memory, held-out data."""

from __future__ import annotations

from collections.abc import Iterator

from dsl import memory
from dsl.rules.finding import Finding
from dsl.schema import Device, Spec
from dsl.stages import is_mirrored

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))


def compute_keeps_sms(spec: Spec) -> Iterator[Finding]:
    """Communication takes some of the SMs of a device that has them."""
    communication = spec.sm.communication
    for path, device in _devices(spec):
        if device.sms is None and communication:
            message = f"communication = {communication} SMs, but device {device.name} states no sms"
            hint = "write `communication = 0`, or give the device its `sms`"
            yield Finding("E0914", message, "sm.communication", hint, (("the device", path),))
            return
        if device.sms is not None and communication >= device.sms:
            message = f"communication = {communication} of {device.sms} SMs leaves none to compute"
            hint = f"write `communication = {min(20, device.sms - 1)}`"
            yield Finding("E0907", message, "sm.communication", hint, (("the device", f"{path}.sms"),))
            return


def devices_have_the_precision(spec: Spec) -> Iterator[Finding]:
    """Linears in FP8 run on devices that multiply in it. A device without any peak stands for it in software."""
    for path, device in _devices(spec):
        if spec.precision.linear == "e4m3" and device.bf16 is not None and device.fp8 is None:
            message = f"linear = e4m3, but device {device.name} has no fp8 peak: it does not multiply in it"
            hint = f"take a precision with `linear = bf16`, or state its peak: `fp8 = {device.bf16 * 2 / 1e12:g}TFLOPS`"
            yield Finding("E0916", message, path, hint, (("the precision", "precision.linear"),))


def _devices(spec: Spec) -> Iterator[tuple[str, Device]]:
    """(path, device) of every kind of the cluster."""
    for index, device in enumerate(spec.cluster.devices):
        yield f"cluster.{'more.' * index}node.device", device


def state_fits(spec: Spec) -> Iterator[Finding]:
    """A device holds at least its weights, their gradients and the optimizer's state: a bound in closed form."""
    path, device = max(_devices(spec), key=lambda each: each[1].memory)  # the fullest may be on any
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
    yield Finding("E0812", message, f"{path}.memory", hint, notes)


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

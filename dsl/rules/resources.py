"""Rules on resources: streaming multiprocessors, peaks, memory, checkpoints and held-out data."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.closed_forms import memory
from dsl.closed_forms.stages import is_folded, is_mirrored
from dsl.facts.devices import PEAKS
from dsl.rules.finding import Finding, nearest_multiple
from dsl.schema import Device, Health, Spec

PEAKS_OF = {"e4m3": ("fp8", 2), "e2m1": ("fp4", 4)}  # dtype → (key of a device, multiple of its BF16 peak)
UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))


def compute_keeps_sms(spec: Spec) -> Iterator[Finding]:
    """Communication takes some of the SMs that a device states, not all."""
    communication = spec.sm.communication
    for path, device in _devices(spec):
        if device.sms is None and communication:
            message = f"communication = {communication} SMs, but device {device.name} states no sms"
            hint = "write `communication = 0`, or give the device its `sms`"
            yield Finding("E0914", message, "sm.communication", hint, (("the device", path),))
            return
        if device.sms is not None and communication >= device.sms:
            message = f"communication = {communication} of {device.sms} SMs leaves none for compute"
            hint = f"write `communication = {min(20, device.sms - 1)}`"
            yield Finding("E0907", message, "sm.communication", hint, (("the device", f"{path}.sms"),))
            return


def devices_have_the_precision(spec: Spec) -> Iterator[Finding]:
    """Linears in FP8 or FP4 need devices that multiply in it; devices without peaks do so in software."""
    linear = spec.precision.linear
    if linear not in PEAKS_OF:
        return
    key, times = PEAKS_OF[linear]
    for path, device in _devices(spec):
        if device.bf16 is not None and getattr(device, key) is None:
            message = f"linear = {linear}, but device {device.name} has no {key} peak, so it cannot multiply in it"
            peak = f"{key} = {device.bf16 * times / 1e12:g}TFLOPS"
            hint = f"take a precision with `linear = bf16`, or state its peak: `{peak}`"
            yield Finding("E0916", message, path, hint, (("the precision", "precision.linear"),))


def devices_have_a_known_speed(spec: Spec) -> Iterator[Finding]:
    """A device is an accelerator with peaks, or a CPU; otherwise its speed is unknown."""
    for path, device in _devices(spec):
        if device.bf16 is None and device.cores is None and "cpu" not in device.name.lower():
            message = f"device {device.name} has no peaks, so its speed is unknown"
            listed = ", ".join(sorted(PEAKS))
            hint = (
                "add its dense peaks from the data sheet, as in `bf16 = 989TFLOPS, fp8 = 1979TFLOPS, hbm = 3.35TB/s, "
                f"sms = 132`; or `cores = 1` if it is a CPU. Devices with known peaks: {listed}"
            )
            yield Finding("E0917", message, path, hint)


def graphs_can_be_captured(spec: Spec) -> Iterator[Finding]:
    """`kernels.graphs` needs devices that have graphs, and weights that keep their addresses."""
    if not spec.kernels.graphs:
        return
    path, hint = "kernels.graphs", "remove `graphs`"
    for place, device in _devices(spec):
        if device.bf16 is None:
            message = f"graphs hold launches on GPUs, but device {device.name} is no accelerator"
            yield Finding("E0946", message, path, hint, (("the device", place),))
            return
    if spec.parallel.zero == 3:
        message = "with zero = 3 weights are gathered into new memory, so no segment can be captured"
        yield Finding("E0946", message, path, f"write `zero = 2`, or {hint}", (("the sharding", "parallel.zero"),))


def _devices(spec: Spec) -> Iterator[tuple[str, Device]]:
    """Yield (path, device) for every kind of device in the cluster."""
    for index, device in enumerate(spec.cluster.devices):
        yield f"cluster.{'more.' * index}node.device", device


def state_fits(spec: Spec) -> Iterator[Finding]:
    """The memory of a device holds at least its weights, gradients and optimizer state: a bound in closed form."""
    device, least = spec.cluster.node.device, memory.lower_bound(spec)
    if spec.cluster.more is None and least.total > device.room:
        message = (
            f"device {device.name} has {_room_text(device, device.room)}, "
            f"but the fullest one needs {size_text(least.total)}"
        )
        yield Finding(
            "E0812", f"{message}: {_parts_text(spec, least)}", "cluster.node.device.memory", *_hint_and_notes(spec)
        )


def state_fits_each_kind(spec: Spec) -> Iterator[Finding]:
    """With several kinds of devices, all ranks together have memory for all state, and the last stage's for its own.

    Of two ranks that mirror each other's stages, both count with the memory of the smaller one.
    """
    kinds = _kinds_of_ranks(spec) if spec.cluster.more is not None else None
    if kinds is None:
        return
    devices = spec.cluster.devices
    room = [devices[kind].room for kind in kinds]
    if is_mirrored(spec):
        room = [min(pair) for pair in zip(room, reversed(room), strict=True)]
    mean, end = memory.mean_bytes(spec), memory.last_stage_bytes(spec)
    if mean.total * len(room) > sum(room):
        message = (
            f"devices have {size_text(sum(room) // len(room))} on average over the {len(room)} pipeline ranks"
            f"{' (of two with the same stages the smaller)' if is_mirrored(spec) else ''}, but need "
            f"{size_text(mean.total)}:  "
            f"{_parts_text(spec, mean)}"
        )
        yield Finding("E0812", message, "cluster", *_hint_and_notes(spec))
        return
    rank = _last_stage_rank(spec, room)
    if end.total > room[rank]:
        kind = next(kind for kind in (kinds[rank], kinds[-1 - rank]) if devices[kind].room == room[rank])
        message = (
            f"device {devices[kind].name} has {_room_text(devices[kind], room[rank])}, "
            f"but with the last stage it needs {size_text(end.total)}: {_parts_text(spec, end)}"
        )
        yield Finding("E0812", message, f"cluster.{'more.' * kind}node.device.memory", *_hint_and_notes(spec))


def _kinds_of_ranks(spec: Spec) -> list[int] | None:
    """The index of the device kind of each pipeline rank; None if the degrees do not fit the devices, which other rules
    report."""
    p, cluster = spec.parallel, spec.cluster
    if p.pipeline * p.columns != cluster.world:
        return None
    ends = [
        (cluster.part_of(rank * p.columns), cluster.part_of((rank + 1) * p.columns - 1)) for rank in range(p.pipeline)
    ]
    return [first for first, _ in ends] if all(first == last for first, last in ends) else None


def _last_stage_rank(spec: Spec, room: list[int]) -> int:
    """A pipeline rank with the last stage; if a schedule file decides, the rank with the most memory."""
    if spec.schedule.file is not None:
        return room.index(max(room))
    return 0 if is_folded(spec) else len(room) - 1


def _room_text(device: Device, room: int) -> str:
    """The memory that a run may use of a device."""
    return (
        f"{size_text(room)} besides its reserve of {size_text(device.reserved_bytes)}"
        if device.reserved_bytes
        else size_text(room)
    )


def _parts_text(spec: Spec, least: memory.DeviceBytes) -> str:
    weights = f"weights (two copies, as {spec.schedule.name} keeps)" if is_mirrored(spec) else "weights"
    return (
        f"{weights} {size_text(least.weights)}, gradients {size_text(least.gradients)}, "
        f"optimizer {size_text(least.optimizer)}, one activation {size_text(least.activations)}"
    )


def _hint_and_notes(spec: Spec) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Hint and notes for a run that does not fit into memory."""
    divided = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"zero": 1})})
    saves_memory = memory.lower_bound(divided).total < memory.lower_bound(spec).total  # false with a single data rank
    zero = "zero = 1, " if spec.parallel.zero == 0 and saves_memory else ""
    return f"plan with {zero}more pipeline or expert ranks, more devices, or larger ones", (("the model", "model"),)


def size_text(num_bytes: int) -> str:
    """Format bytes with at least two digits, in decimal units."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS if num_bytes >= scale), (" bytes", 1))
    digits = 0 if scale == 1 or num_bytes >= 100 * scale else 1
    return f"{num_bytes / scale:,.{digits}f}{unit}"


def validation_has_data(spec: Spec) -> Iterator[Finding]:
    """A held-out loss needs held-out documents."""
    if spec.train.validate is not None and spec.data.validation == 0:
        message = "the run validates, but holds out validation = 0% of the documents"
        note = ("it validates here", "train.validate")
        yield Finding("E0915", message, "data.validation", "write `validation = 1%`", (note,))


def best_is_measured(spec: Spec) -> Iterator[Finding]:
    """The best checkpoints are those with the lowest held-out loss, which must be measured."""
    saved = spec.train.checkpoint
    if saved is not None and saved.best and spec.train.validate is None:
        message = f"best = {saved.best} keeps checkpoints by validation loss, but the run does not validate"
        hint = f"add `validate {{ every = {saved.every} steps }}` to train, or write `best = 0`"
        yield Finding("E0918", message, "train.checkpoint.best", hint)


def rollback_finds_a_checkpoint(spec: Spec) -> Iterator[Finding]:
    """The checkpoints that are kept reach back as many steps as a rollback."""
    health, saved = spec.train.health, spec.train.checkpoint
    if health is None or not health.rolls_back:
        return
    path = "train.health.not_finite" if health.not_finite == "rollback" else "train.health.spike.action"
    if saved is None:
        message = "a rollback needs a checkpoint, but the run saves none before its end"
        hint = f"add `checkpoint {{ every = {health.back} steps }}` to train"
        yield Finding("E0929", message, path, hint)
    elif (reach := (saved.keep - 1) * saved.every) < health.back:
        message = (
            f"back = {health.back:,} steps, but the oldest of {saved.keep} checkpoints, {saved.every:,} steps apart, "
            f"may be only {reach:,} steps old"
        )
        keep = -(-health.back // saved.every) + 1
        note = ("the steps", "train.health.back") if health.back != Health().back else (("a rollback", path))
        yield Finding("E0929", message, "train.checkpoint.keep", f"write `keep = {keep}`", (note,))


def average_is_kept(spec: Spec) -> Iterator[Finding]:
    """A run that validates a moving average also keeps it."""
    validate = spec.train.validate
    if validate is not None and validate.ema and spec.train.ema is None:
        message = "validate.ema measures the moving average of the weights, but the run keeps none"
        hint = "add `ema { decay = 0.999 }` to train, or write `ema = false`"
        yield Finding("E0923", message, "train.validate.ema", hint)


def offloaded_state_exists(spec: Spec) -> Iterator[Finding]:
    """Offloaded master weights are separate from the weights, which stay on the device."""
    precision = spec.precision
    if "master" in spec.offload and precision.master == precision.parameter:
        remaining = ", ".join(name for name in spec.offload if name != "master")
        message = f"offload names master, but weights and master weights are the same tensors, in {precision.master}"
        note = ("the precision", "precision")
        yield Finding("E0924", message, "offload", f"write `offload = [{remaining}]`", (note,))


def kept_checkpoints_are_saved(spec: Spec) -> Iterator[Finding]:
    """Checkpoints to keep forever are among those that are saved."""
    saved = spec.train.checkpoint
    if saved is not None and saved.keep_every is not None and saved.keep_every % saved.every:
        message = f"keep_every = {saved.keep_every:,} steps is not a multiple of every = {saved.every:,} steps"
        hint = f"write `keep_every = {nearest_multiple(saved.keep_every, saved.every)} steps`"
        note = ("they are saved here", "train.checkpoint.every")
        yield Finding("E0919", message, "train.checkpoint.keep_every", hint, (note,))

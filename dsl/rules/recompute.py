"""What the backward computes again is there, and is named once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsl.rules.finding import Finding
from dsl.schema import DeltaNet, Gqa, Moe, Spec

LAYER = "layer"


def recomputed_ops_exist(spec: Spec) -> Iterator[Finding]:
    """What is computed again is computed at all."""
    moe = [span.ffn for span in spec.model.layers if isinstance(span.ffn, Moe)]
    absent = {"mla_up": not spec.model.has_latents} | dict.fromkeys(("router", "experts"), not moe)
    attentions = [span.attention or spec.model.attention for span in spec.model.layers]
    absent["qkv"] = not any(isinstance(each, Gqa | DeltaNet) for each in attentions)
    absent["shared"] = not any(ffn.shared for ffn in moe)
    absent["dense"] = len(moe) == len(spec.model.layers)
    absent["hyper"] = spec.model.hyper_connections is None
    absent["logits"] = spec.model.logit_cap is not None  # they are bent by an op of its own, which needs all of them
    lost = [name for name in spec.recompute if absent.get(name)]
    if lost:
        message = f"recompute names {', '.join(lost)}, which model {spec.model.name} does not compute"
        yield _without(spec, lost, message, (("the model", "model"),))


def layers_are_named_once(spec: Spec) -> Iterator[Finding]:
    """Ops beside `layer` are those of other layers, or of what is no layer: the head, the norms in front of MTP."""
    ends = spec.model.hyper_connections is not None
    outside = {LAYER, "logits", *(("rmsnorm",) if spec.model.mtp else ()), *(("hyper",) if ends else ())}
    inside = [name for name in spec.recompute if name not in outside]
    if LAYER in spec.recompute and spec.recompute_layers is None and inside:
        message = f"recompute names {', '.join(inside)} beside layer, which runs all of every layer again"
        yield _without(spec, inside, message)


def counted_layers_are_run_again(spec: Spec) -> Iterator[Finding]:
    """Layers that are counted are run again, and a stage may have so many."""
    count, most = spec.recompute_layers, spec.model.num_layers + (spec.model.mtp.depth if spec.model.mtp else 0)
    if count is None:
        return
    if LAYER not in spec.recompute:
        message = f"recompute_layers = {count}, and recompute does not name layer"
        hint = f"write `recompute = [{', '.join((LAYER, *spec.recompute))}]`"
        yield Finding("E0927", message, "recompute_layers", hint, (("what is computed again", "recompute"),))
    elif count > most:
        message = f"recompute_layers = {count}, and model {spec.model.name} has {most} layers"
        yield Finding("E0927", message, "recompute_layers", "leave `recompute_layers` out: all layers are run again")


def _without(spec: Spec, lost: Sequence[str], message: str, related: tuple[tuple[str, str], ...] = ()) -> Finding:
    kept = ", ".join(name for name in spec.recompute if name not in lost)
    return Finding("E0913", message, "recompute", f"write `recompute = [{kept}]`", related)

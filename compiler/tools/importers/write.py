"""Writes a model and the remarks on it as the text of a spec, in canonical style. Parsing it gives the same model."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from compiler.tools.importers.reader import Place, Remark
from dsl.closed_forms.counts import parameters
from dsl.schema import (
    AnyAttention,
    Balance,
    Compressed,
    Csa,
    Custom,
    DeltaNet,
    Dense,
    Gqa,
    Hca,
    LinearScaling,
    Llama3Scaling,
    Mla,
    Model,
    Moe,
    Node,
    Phase,
    Rope,
    YarnScaling,
)

INDEXER = ("heads", "head_dim", "top_k", "loss")
WIDTH = 112  # columns of a comment
MAX_REMARKS = 50  # per place
INDENT = "  "
MAX_NAME = 48
RESERVED = {
    "auto",
    "none",
    "true",
    "false",
    "model",
    "cluster",
    "precision",
    "run",
    "let",
    "import",
    "extends",
    "pretrain",
}


def identifier(text: str, fallback: str = "imported") -> str:
    """A block name from the last part of a path or of a model's name: ASCII letters, digits and underscores."""
    part = text.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^a-z0-9]+", "_", part.lower()).strip("_")[:MAX_NAME].strip("_")
    if not name:
        return fallback
    return name if name[0].isalpha() and name not in RESERVED else f"model_{name}"


def model_text(model: Model, model_type: str, remarks: Iterable[Remark]) -> str:
    """The model block with the comments before and in it."""
    return "\n".join(_model(model, model_type, tuple(remarks))) + "\n"


def number(value: float) -> str:
    """A number in a spec's style: `129_280`, `1e-6`, `0.02`."""
    if value == int(value) and abs(value) < 1e15:
        integer = int(value)
        return f"{integer:_}" if integer >= 10_000 else str(integer)
    mantissa, e, exponent = repr(value).partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def comment(text: str, indent: str = "") -> Iterator[str]:
    """A text as wrapped comment lines of printable ASCII."""
    plain = text.encode("ascii", "backslashreplace").decode("ascii")
    plain = "".join(c if c.isprintable() else "?" for c in plain)
    for line in textwrap.wrap(plain, WIDTH - len(indent), subsequent_indent="  "):
        yield f"{indent}# {line}"


def _remark_lines(remarks: tuple[Remark, ...], place: Place, indent: str) -> Iterator[str]:
    texts = [remark.text for remark in remarks if remark.place == place]
    for text in texts[:MAX_REMARKS]:
        yield from comment(text, indent)
    if len(texts) > MAX_REMARKS:
        yield f"{indent}# and {len(texts) - MAX_REMARKS} more"


def _model(model: Model, model_type: str, remarks: tuple[Remark, ...]) -> Iterator[str]:
    count = parameters(model)
    mtp_count = f", and {count.mtp:,} of multi-token prediction" if count.mtp else ""
    yield from comment(f"From a Hugging Face config of type {model_type}: {count.total:,} parameters{mtp_count}.")
    yield from _remark_lines(remarks, "model", "")
    yield f"model {model.name} {{"
    sizes = f"vocab = {number(model.vocab)}, hidden = {number(model.hidden)}"
    yield f"  {sizes}, init_std = {number(model.init_std)}, norm_eps = {number(model.norm_eps)}"
    if options := _non_default(model, "tied", "norm", "embedding_scale", "residual_scale", "logit_scale", "logit_cap"):
        yield f"  {options}"
    if hyper := model.hyper_connections:
        yield f"  hyper_connections {{ streams = {hyper.streams}, rounds = {hyper.rounds}, eps = {number(hyper.eps)} }}"
    yield from _remark_lines(remarks, "attention", INDENT)
    attention = model.attention
    yield from _attention(attention, remarks)
    yield from _remark_lines(remarks, "ffn", INDENT)
    has_remarks = False  # whether the remarks on balancing are written
    for span in model.layers:
        ffn = span.ffn
        assert not isinstance(ffn, Custom), "no configuration has a user-defined module"
        head = f"  layers {span.first}..{span.last}{f' by {span.by}' if span.by > 1 else ''} {{"
        parts = [] if span.attention is None else [*_range_attention_lines(attention, span.attention)]
        if isinstance(ffn, Dense) and span.by == 1:  # every N-th layer keeps the FFN of the surrounding range
            act = _non_default(ffn, "activation", "bias")
            parts.append(f"  ffn dense {{ inner = {number(ffn.inner)}{', ' + act if act else ''} }}")
        has_experts = isinstance(ffn, Moe) and span.by == 1
        if len(parts) <= 2 and not has_experts:
            yield f"{head} {', '.join(part.strip() for part in parts)} }}"
            continue
        yield head
        yield from (f"{INDENT}{part}" for part in parts)
        if isinstance(ffn, Moe) and has_experts:
            writes_remarks = not has_remarks and ffn.choice == "scores"
            yield from _moe(ffn, remarks if writes_remarks else ())
            has_remarks = has_remarks or writes_remarks
        yield "  }"
    if model.mtp is not None:
        yield from _remark_lines(remarks, "mtp", INDENT)
        override = model.mtp.attention
        changes = "" if override is None else f", attention {{ {_changes(attention, override)} }}"
        yield f"  mtp {{ depth = {model.mtp.depth}, weight = {_phases(model.mtp.weight)}{changes} }}"
    yield "}"


def _attention(attention: AnyAttention, remarks: tuple[Remark, ...]) -> Iterator[str]:
    """An attention block of any kind."""
    if isinstance(attention, DeltaNet):
        yield from _deltanet(attention)
    elif isinstance(attention, Mla):
        yield from _mla(attention, remarks)
    elif isinstance(attention, Compressed):
        yield from _compressed_attention_lines(attention, remarks)
    else:
        assert isinstance(attention, Gqa), "no configuration has a user-defined module"
        yield from _gqa(attention, remarks)


def _range_attention_lines(usual: AnyAttention, other: AnyAttention) -> Iterator[str]:
    """The attention of a range: only the differences from the model's, or all of it if it is of another kind."""
    if type(usual) is type(other):
        yield f"  attention {{ {_changes(usual, other)} }}"
    else:
        yield from _attention(other, ())


def _deltanet(net: DeltaNet) -> Iterator[str]:
    yield "  attention deltanet {"
    yield f"    heads = {number(net.heads)}, key_heads = {number(net.key_heads)}"
    yield f"    key_dim = {number(net.key_dim)}, value_dim = {number(net.value_dim)}"
    yield f"    gate = {net.gate}, convolution = {net.convolution}"
    yield "  }"


def _compressed_attention_lines(sizes: Compressed, remarks: tuple[Remark, ...]) -> Iterator[str]:
    yield "  attention compressed {"
    heads = f"heads = {number(sizes.heads)}, head_dim = {sizes.head_dim}, query_rank = {number(sizes.query_rank)}"
    yield f"    {heads}, window = {number(sizes.window)}, sinks = {_value(sizes.sinks)}"
    yield f"    groups = {number(sizes.groups)}, out_rank = {number(sizes.out_rank)}"
    yield f"    {_entries(sizes.compress)}"
    yield from _rope(sizes.rope, remarks)


def _entries(compress: Csa | Hca | None) -> str:
    """The key or block `compress`."""
    if compress is None:
        return "compress = none"
    indexer = f", indexer {{ {_non_default(compress.indexer, *INDEXER)} }}" if isinstance(compress, Csa) else ""
    return f"compress {compress.kind} {{ rate = {number(compress.rate)}{indexer} }}"


def _mla(mla: Mla, remarks: tuple[Remark, ...]) -> Iterator[str]:
    dim, rank = mla.head_dim, "none" if mla.query_rank is None else number(mla.query_rank)
    yield "  attention mla {"
    yield f"    heads = {number(mla.heads)}, query_rank = {rank}, kv_rank = {number(mla.kv_rank)}"
    yield f"    head_dim {{ nope = {dim.nope}, rope = {dim.rope}, value = {dim.value} }}"
    if mla.scale is not None:
        yield f"    scale = {number(mla.scale)}"
    if (indexer := mla.indexer) is not None:
        sizes = f"heads = {indexer.heads}, head_dim = {indexer.head_dim}, top_k = {number(indexer.top_k)}"
        yield f"    indexer {{ {sizes} }}"
    yield from _rope(mla.rope, remarks)


def _gqa(gqa: Gqa, remarks: tuple[Remark, ...]) -> Iterator[str]:
    yield "  attention gqa {"
    norm = {None: "", "head": ", qk_norm = true", "width": ", qk_norm = width"}[gqa.qk_norm]
    yield f"    heads = {number(gqa.heads)}, kv_heads = {number(gqa.kv_heads)}, head_dim = {gqa.head_dim}{norm}"
    if options := _non_default(gqa, "bias", "scale", "window", "sinks", "output_gate", "softcap"):
        yield f"    {options}"
    yield from _rope(gqa.rope, remarks)


def _rope(rope: Rope | None, remarks: tuple[Remark, ...]) -> Iterator[str]:
    yield from _remark_lines(remarks, "rope", INDENT * 2)
    if rope is None:
        yield "    rope = none"
    elif rope.scaling is None:
        yield f"    rope {{ {', '.join(_rope_keys(rope))} }}"
    else:
        yield "    rope {"
        yield from (f"      {part}" for part in _rope_keys(rope))
        yield "    }"
    yield "  }"


def _rope_keys(rope: Rope) -> Iterator[str]:
    """The keys of a `rope` block, and its scaling."""
    yield _non_default(rope, "theta", "width")
    if rope.scaling is not None:
        yield _scaling(rope.scaling)


def _scaling(scaling: LinearScaling | Llama3Scaling | YarnScaling) -> str:
    keys = [name for name in type(scaling).model_fields if name != "kind"]
    return f"scaling {scaling.kind} {{ {_non_default(scaling, *keys)} }}"


def _changes(usual: AnyAttention, other: AnyAttention) -> str:
    """The keys in which the attention of a range differs from the model's."""
    fields = [name for name in type(other).model_fields if getattr(other, name) != getattr(usual, name)]
    assert type(usual) is type(other) and {*fields} <= {"window", "compress", "rope"}, fields
    return ", ".join(_change(name, getattr(usual, name), getattr(other, name)) for name in fields)


def _change(name: str, usual: Any, other: Any) -> str:
    """One key of a range's attention. A block has only the keys that differ, since it is merged into the model's."""
    if name == "compress":
        return _entries(other)
    if not isinstance(usual, Rope) or not isinstance(other, Rope):
        return f"rope {{ {', '.join(_rope_keys(other))} }}" if isinstance(other, Rope) else f"{name} = {_value(other)}"
    keys = [key for key in ("theta", "width") if getattr(other, key) != getattr(usual, key)]
    parts = [f"{key} = {_value(getattr(other, key))}" for key in keys]
    if other.scaling != usual.scaling:
        parts.append("scaling = none" if other.scaling is None else _scaling(other.scaling))
    return f"rope {{ {', '.join(parts)} }}"


def _non_default(node: Node, *names: str) -> str:
    """`key = value` for the fields that differ from their defaults."""
    fields = [(name, getattr(node, name)) for name in names]
    changed = [(name, value) for name, value in fields if value != type(node).model_fields[name].default]
    return ", ".join(f"{name} = {_value(value)}" for name, value in changed)


def _value(value: bool | float | str | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else number(value)


def _moe(moe: Moe, remarks: tuple[Remark, ...]) -> Iterator[str]:
    yield "    ffn moe {"
    sizes = f"experts = {number(moe.experts)}, shared = {moe.shared}, top_k = {moe.top_k}"
    yield f"      {sizes}, inner = {number(moe.inner)}"
    if options := _non_default(moe, "activation", "bias", "router_bias", "shared_inner", "shared_gate", "choice"):
        yield f"      {options}"
    if moe.clamp is not None:
        yield f"      clamp {{ {_non_default(moe.clamp, 'limit', 'alpha', 'shift')} }}"
    if (moe.groups, moe.top_groups) != (1, 1):
        yield f"      groups = {number(moe.groups)}, top_groups = {number(moe.top_groups)}"
    normalize = "true" if moe.normalize else "false"
    yield f"      score = {moe.score}, normalize = {normalize}, scale = {number(moe.scale)}"
    yield from _remark_lines(remarks, "balance", INDENT * 3)
    if moe.balance != Balance():
        yield f"      balance {{ {', '.join(_balance(moe.balance))} }}"
    yield "    }"


def _balance(balance: Balance) -> Iterator[str]:
    if balance.bias_rate is not None:
        yield f"bias_rate = {_phases(balance.bias_rate)}"
    if balance.sequence_loss:
        yield f"sequence_loss = {number(balance.sequence_loss)}"


def _phases(phases: tuple[Phase, ...]) -> str:
    assert len(phases) == 1
    return number(phases[0].value)

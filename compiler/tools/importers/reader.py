"""Reads a configuration key by key: checks type and bounds, keeps spans, and accounts for every key.

Errors are collected, and a valid stand-in is returned, so that one run reports all errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from compiler.tools.importers.json_text import JsonValue
from dsl.messages.diagnostics import Diagnostic, Note, Span
from dsl.schema import Node
from dsl.schema.base import fields_of

MAX_QUOTED = 60  # characters of a value or key quoted in a message
REQUIRED: Any = object()
Place = Literal["model", "attention", "rope", "ffn", "balance", "mtp"]


@dataclass(frozen=True)
class Remark:
    """A comment before a part of the model: what the spec leaves out, adds or changes."""

    place: Place
    text: str


def value_text(value: Any) -> str:
    """A value of a configuration as one line of ASCII JSON, shortened if it is long."""
    text = json.dumps(_python_value(value), ensure_ascii=True)
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def _python_value(value: Any) -> Any:
    if isinstance(value, JsonValue):
        return _python_value(value.value)
    if isinstance(value, Mapping):
        return {key: _python_value(member) for key, member in value.items()}
    return [_python_value(item) for item in value] if isinstance(value, tuple) else value


class ConfigReader:
    """One object of a configuration. A key that is null counts as absent unless the caller says otherwise."""

    def __init__(self, root: JsonValue, *, lossy: bool) -> None:
        self.root, self.lossy = root, lossy
        self.members: Mapping[str, JsonValue] = root.value
        self.used: set[str] = set()
        self.defaults: Mapping[str, Any] = {}  # defaults of the model type, once that is known
        self.filled: dict[str, Any] = {}  # absent keys, with the default used
        self.mistakes: list[Diagnostic] = []
        self.remarks: list[Remark] = []
        self.origins: dict[str, Span] = {"": Span(root.span.source, root.span.start, root.span.start + 1)}

    # ------------------------------------------------------------ values

    def get(self, *names: str) -> JsonValue | None:
        """The value of a key, which may have several names; None if it is absent or null."""
        self.used.update(names)
        present = [(name, self.members[name]) for name in names if name in self.members]
        if len({value_text(value) for _, value in present}) > 1:
            (first, former), (second, latter) = present[:2]
            unequal = f"`{second}` is {value_text(latter)}, `{first}` is {value_text(former)}"
            message = f"{unequal}: they are two names of one value"
            self.complain("I0203", message, latter.span, "remove one of them", Note(f"`{first}`", former.span))
        return next((value for _, value in present if value.value is not None), None)

    def number(
        self, path: str, cls: type[Node], field: str, *names: str, default: Any = REQUIRED, null: Any = REQUIRED
    ) -> Any:
        """A number with the type and bounds of a schema field. Records its origin under the spec path `path`.

        default: value of an absent key without a default of the model type; null: value of null, if it differs.
        """
        low = _least(cls, field)
        value = self.get(*names)
        if value is None:
            if null is not REQUIRED and any(name in self.members for name in names):
                return null
            fallback = self._default(names, default, null)
            return self._missing(names, low) if fallback is REQUIRED else fallback
        name = next((name for name in names if self.members.get(name) is value), names[0])
        is_whole = int in fields_of(cls)[field].types
        if isinstance(value.value, bool) or not isinstance(value.value, (int,) if is_whole else (int, float)):
            kind = "a whole number" if is_whole else "a number"
            self.complain("I0203", f"`{name}` must be {kind}, not {value_text(value)}", value.span)
            return low
        if not all(_holds(value.value, bound) for bound in cls.model_fields[field].metadata):
            message = f"`{name}` = {value_text(value)} is out of bounds: {_interval(cls, field)}"
            self.complain("I0203", message, value.span)
            return low
        self.origins[path] = value.span
        return value.value if is_whole else float(value.value)

    def count(self, name: str, low: int, high: int, default: int = REQUIRED, alias: str = "") -> int:
        """A whole number from `low` to `high` that a spec has no key for. Others are reported, and `low` returned."""
        names = (name, alias) if alias else (name,)
        value = self.get(*names)
        if value is None:
            fallback: int = self._default(names, default)
            return self._missing((name,), low) if fallback is REQUIRED else fallback
        if isinstance(value.value, bool) or not isinstance(value.value, int) or not low <= value.value <= high:
            message = f"`{name}` must be a whole number from {low:,} to {high:,}, not {value_text(value)}"
            self.complain("I0203", message, value.span)
            return low
        return value.value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean. A value of another type is reported, and `default` is returned."""
        value = self.get(name)
        if value is None:
            return bool(self._default((name,), default))
        if not isinstance(value.value, bool):
            self.complain("I0203", f"`{name}` must be true or false, not {value_text(value)}", value.span)
            return default
        return value.value

    def text(self, name: str, default: str) -> str:
        """A string. A value of another type is reported, and `default` is returned."""
        value = self.get(name)
        if value is None:
            return str(self._default((name,), default))
        if not isinstance(value.value, str):
            self.complain("I0203", f"`{name}` must be a text, not {value_text(value)}", value.span)
            return default
        return value.value

    def part(self, name: str) -> Mapping[str, JsonValue]:
        """An object within the configuration; empty if it is absent."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value.value, Mapping):
            self.complain("I0203", f"`{name}` must be an object, not {value_text(value)}", value.span)
            return {}
        return value.value

    def _default(self, names: tuple[str, ...], otherwise: Any, null: Any = REQUIRED) -> Any:
        """The value of an absent key: the model type's default, recorded in `filled`, or else `otherwise`."""
        name = next((name for name in names if name in self.defaults), None)
        if name is None:
            return otherwise
        fallback = self.defaults[name]
        self.filled[name] = null if fallback is None else fallback
        return self.filled[name]

    # ------------------------------------------------------------ findings

    @property
    def has_failed(self) -> bool:
        return any(item.severity == "error" for item in self.mistakes)

    def place(self, name: str) -> Span | None:
        """The span of a key; None if it is absent."""
        return self.members[name].key if name in self.members else None

    def complain(self, code: str, message: str, span: Span | None, hint: str = "", *notes: Note) -> None:
        self.mistakes.append(Diagnostic(code, message, span, hint, notes))

    def warn(self, code: str, place: Place, text: str, span: Span | None = None) -> None:
        """Report a warning and add it to the spec as a comment."""
        self.mistakes.append(Diagnostic(code, text, span, severity="warning"))
        self.remarks.append(Remark(place, text))

    def refuse(self, place: Place, name: str, meaning: str, value: JsonValue | None = None) -> None:
        """Report a key that a spec cannot express: an error, or with `lossy` a warning and a comment."""
        value = value or self.members.get(name)
        written = f"`{name}` = {value_text(value)}" if value is not None else f"no `{name}`"
        span = value.span if value is not None else self.origins[""]
        if self.lossy:
            self.warn("I0301", place, f"{written}: {meaning}; lost here", span)
        else:
            self.complain("I0301", f"{written}: {meaning}", span)

    def _missing(self, names: tuple[str, ...], stand_in: int) -> int:
        null = next((self.members[name] for name in names if name in self.members), None)
        aliases = f" (or `{'`, `'.join(names[1:])}`)" if names[1:] else ""
        message = f"`{names[0]}`{aliases} is {'null' if null else 'missing'}"
        self.complain("I0202", message, null.span if null else self.origins[""])
        return stand_in


def _limits(cls: type[Node], field: str) -> tuple[Ge | Gt, Le | Lt]:
    metadata = cls.model_fields[field].metadata
    low = next(bound for bound in metadata if isinstance(bound, (Ge, Gt)))
    return low, next(bound for bound in metadata if isinstance(bound, (Le, Lt)))


def _least(cls: type[Node], field: str) -> Any:
    """A number within the bounds of a field."""
    low, high = _limits(cls, field)
    return low.ge if isinstance(low, Ge) else high.le if isinstance(high, Le) else None


def _interval(cls: type[Node], field: str) -> str:
    low, high = _limits(cls, field)
    lower = f"at least {_digits(low.ge)}" if isinstance(low, Ge) else f"above {_digits(low.gt)}"
    upper = f"at most {_digits(high.le)}" if isinstance(high, Le) else f"below {_digits(high.lt)}"
    return f"{lower} and {upper}"


def _digits(value: Any) -> str:
    return f"{value:,}".removesuffix(".0")


def _holds(value: Any, bound: object) -> bool:
    match bound:
        case Ge(ge=limit):
            return bool(value >= limit)
        case Gt(gt=limit):
            return bool(value > limit)
        case Le(le=limit):
            return bool(value <= limit)
        case Lt(lt=limit):
            return bool(value < limit)
    return True


# --- Keys of Hugging Face configurations that are not read into a model

# key → why it does not affect training
IRRELEVANT = {
    "architectures": "the class of the model; model_type says the same",
    "auto_map": "the place of the class's code",
    "base_model_tp_plan": "how inference splits the weights",
    "bos_token_id": "the tokenizer's",
    "cache_implementation": "how inference keeps keys and values",
    "chunk_size_feed_forward": "how inference chunks the feed-forward layers",
    "dtype": "how the published weights are stored",
    "eos_token_id": "the tokenizer's",
    "ep_size": "how inference spreads the experts",
    "head_dim_original": "a note of the converter",
    "id2label": "for classification",
    "initial_context_length": "the context before it was extended; rope_scaling says the same",
    "is_encoder_decoder": "false for these models",
    "label2id": "for classification",
    "max_position_embeddings": "a run sets the length of its sequences",
    "max_window_layers": "the first layer with a window, read only by some types",
    "num_return_sequences": "for generation",
    "output_attentions": "what inference returns",
    "output_hidden_states": "what inference returns",
    "output_router_logits": "what the forward pass returns",
    "pad_token_id": "the tokenizer's",
    "prefix": "for generation",
    "pretraining_tp": "repeats the rounding of a tensor-parallel run",
    "problem_type": "for classification",
    "qk_head_dim": "nope + rope",
    "quantization_config": "how the published weights are stored",
    "return_dict": "what inference returns",
    "rope_interleave": "the order of rotated pairs, which does not matter when training from scratch",
    "tokenizer_class": "the tokenizer's",
    "torch_dtype": "how the published weights are stored",
    "transformers_version": "the version that wrote the file",
    "use_cache": "for generation",
}
# key → the key whose value it repeats in published configurations
REPEATED = {"hidden_act": "hidden_activation", "sliding_window_size": "sliding_window"}
# Keys that only some model types read, and their values that mean the same as an absent key.
OF_TYPES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (),
    "layer_types": (),
    "mlp_layer_types": (),
    "norm_topk_prob": (),
    "scoring_func": ("sigmoid",),
    "sliding_window": (False, 0),
    "topk_method": ("noaux_tc",),
    "use_sliding_window": (False,),
}
MLA = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_linear")
REMOTE = ("deepseek", "kimi_k2")  # types whose code is published with the weights; the keys it reads are unknown here


@dataclass(frozen=True)
class UnsupportedKey:
    """A key for a feature that a spec cannot express.

    `harmless`: values that turn the feature off. `place`: where the comment belongs. `types`: model types whose classes
    in `transformers` 5.23 implement it; None: all. For other types the key is ignored, there and here.
    """

    harmless: tuple[object, ...]
    meaning: str
    place: Place
    types: tuple[str, ...] | None = None

    def is_read(self, model_type: str) -> bool:
        """Whether models of a type implement the feature."""
        return self.types is None or model_type in (*self.types, *REMOTE)


_DROPOUT = "dropout; a spec has none"
_NORMS = "norms on queries and keys that this model type does not have"
REFUSED = {
    "attention_bias": UnsupportedKey(
        (False,), "biases on the projections of latent attention; a spec has none", "attention", MLA
    ),
    "attention_dropout": UnsupportedKey((0, 0.0), _DROPOUT, "attention"),
    "attn_logit_softcapping": UnsupportedKey((), "attention logits capped by tanh", "attention", ()),
    "clip_qkv": UnsupportedKey((), "queries, keys and values clipped to a bound", "attention", ("olmoe",)),
    "embd_pdrop": UnsupportedKey((0, 0.0), _DROPOUT, "model", ()),
    "final_logit_softcapping": UnsupportedKey((), "output logits capped by tanh", "model", ()),
    "hidden_dropout": UnsupportedKey((0, 0.0), _DROPOUT, "model", ()),
    "index_topk": UnsupportedKey((), "attention to chosen tokens only", "attention", ()),
    "mlp_bias": UnsupportedKey((False,), "biases in the feed-forward layers", "ffn", ("deepseek_v2", "deepseek_v4")),
    "partial_rotary_factor": UnsupportedKey(
        (1, 1.0), "rotates only a part of each head, which this model type does not do", "rope"
    ),
    "qk_layernorm": UnsupportedKey((False,), _NORMS, "attention", ()),
    "resid_pdrop": UnsupportedKey((0, 0.0), _DROPOUT, "model", ()),
    "router_jitter_noise": UnsupportedKey(
        (0, 0.0), "noise on the router's input; a spec has none", "ffn", ("mixtral",)
    ),
    "shared_expert_intermediate_size": UnsupportedKey((0,), "a shared expert of its own width", "ffn", ()),
    "use_bidirectional_attention": UnsupportedKey(
        (False,), "attention to later tokens; attention in a spec is causal", "attention", ("gemma3_text",)
    ),
    "use_mrope": UnsupportedKey(
        (False,), "positions in height and width as well; a spec has positions in time only", "rope", ()
    ),
    "use_qk_norm": UnsupportedKey((False,), _NORMS, "attention", ()),
}

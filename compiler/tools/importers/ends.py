"""Model-wide settings of a Hugging Face config: tied embeddings, multipliers, the logit cap, the activation."""

from __future__ import annotations

from typing import Any

from compiler.tools.importers.families import ConfigFamily
from compiler.tools.importers.reader import ConfigReader, value_text
from dsl.schema import Model
from dsl.schema.model import Act

ACTIVATIONS: dict[str, Act] = {  # config name → gated activation: feed-forward layers of all families are gated
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
}


def model_fields(reader: ConfigReader, family: ConfigFamily, hidden: int) -> dict[str, Any]:
    """The fields of `Model` that apply to all layers or to the embedding and head."""
    fields: dict[str, Any] = {"tied": reader.flag("tie_word_embeddings", False), "norm": family.norm}
    if family.scales_embedding:
        fields["embedding_scale"] = hidden**0.5
    if family.caps_logits:
        fields["logit_cap"] = reader.number(
            "model.logit_cap", Model, "logit_cap", "final_logit_softcapping", default=None, null=None
        )
    if family.multiplies:
        for field, name in (("embedding_scale", "embedding_multiplier"), ("residual_scale", "residual_multiplier")):
            fields[field] = reader.number(f"model.{field}", Model, field, name, default=1.0)
        fields["logit_scale"] = 1 / reader.number(
            "model.logit_scale", Model, "logit_scale", "logits_scaling", default=1.0
        )
    return fields


def activation(reader: ConfigReader) -> Act:
    """The activation of all feed-forward layers, from the key that the model type's class reads."""
    name = "hidden_activation" if "hidden_activation" in reader.defaults else "hidden_act"
    word = reader.text(name, "silu")
    if word not in ACTIVATIONS:
        value = reader.members.get(name)
        if value is not None and isinstance(value.value, str):
            reader.refuse("ffn", name, f"a spec supports the activations {', '.join(ACTIVATIONS)}", value)
        return "swiglu"
    return ACTIVATIONS[word]


def qkv_biases(reader: ConfigReader) -> None:
    """Refuse a config that turns off the QKV biases that its model type has."""
    if not reader.flag("qkv_bias", True):
        reader.refuse(
            "attention",
            "qkv_bias",
            f"{value_text(reader.members['qkv_bias'])} removes the QKV biases of this model type",
        )

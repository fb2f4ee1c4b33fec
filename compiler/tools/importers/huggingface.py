"""Imports a Hugging Face config.json as the model of a spec, with remarks on everything that a spec cannot express.

Every key is read into the model, known to make no difference (`IRRELEVANT`), refused (`REFUSED`), or reported as
unknown. The rules follow the classes of `transformers`, and DeepSeek's own modeling code where the two differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from compiler.tools.importers.attention import Attention, attentions
from compiler.tools.importers.deepseek_v4 import hyper_connections
from compiler.tools.importers.ends import model_fields
from compiler.tools.importers.families import FAMILIES, OTHER_TYPES
from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.layers import assign_attention, layers
from compiler.tools.importers.reader import IRRELEVANT, OF_TYPES, REFUSED, REPEATED, ConfigReader, Remark, value_text
from dsl import rules
from dsl.messages.diagnostics import Diagnostic, Span, in_order
from dsl.resolve.context import suggest
from dsl.schema import Model, Mtp, Phase, Spec
from dsl.schema.base import fields_of

MTP_WEIGHT = 0.3  # DeepSeek-V3's weight for its first 10T tokens
LATENT_EPS = 1e-6  # eps of latent norms in transformers and in DeepSeek's code, whatever rms_norm_eps is
LONGEST = 4096  # longest suggested training sequence in tokens, even if the config's context is longer


@dataclass(frozen=True)
class ImportedConfig:
    """The model that a config describes, with the remarks and diagnostics of the import."""

    model_type: str
    model: Model | None  # None if the config has errors
    context: int  # tokens per pre-training sequence
    remarks: tuple[Remark, ...]
    diagnostics: tuple[Diagnostic, ...]  # in the order of the config file


def read(root: JsonValue, name: str, *, lossy: bool = False) -> ImportedConfig:
    """Import a config as a model called `name`. Raises nothing: errors are in the diagnostics."""
    source = root.span.source
    if not isinstance(root.value, Mapping):
        mistake = Diagnostic("I0101", f"a config is a JSON object, this is {value_text(root)}", root.span)
        return ImportedConfig("", None, 0, (), (mistake,))
    reader = ConfigReader(root, lossy=lossy)
    model_type = _model_type(reader)
    if model_type not in FAMILIES:
        return ImportedConfig(model_type, None, 0, (), tuple(reader.mistakes))
    family = FAMILIES[model_type]
    reader.defaults = {family.renamed.get(key, key): value for key, value in family.defaults.items()}
    reader.members = {family.renamed.get(key, key): value for key, value in reader.members.items()}
    context = reader.count("max_position_embeddings", 1, 2**40)
    hidden = reader.number("model.hidden", Model, "hidden", "hidden_size")
    vocab = reader.number("model.vocab", Model, "vocab", "vocab_size")
    spans = layers(reader, family, model_type)
    by_layer, original, of_mtp = attentions(reader, family, hidden, context, spans[-1].last + 1)
    usual, spans = assign_attention(spans, by_layer)
    fields = {
        "name": name,
        "vocab": vocab,
        "hidden": hidden,
        "init_std": reader.number("model.init_std", Model, "init_std", "initializer_range"),
        "norm_eps": reader.number("model.norm_eps", Model, "norm_eps", "rms_norm_eps"),
        "attention": usual,
        "layers": spans,
        "mtp": _mtp(reader, None if of_mtp == by_layer[-1] else of_mtp),
        **({"hyper_connections": hyper_connections(reader)} if family.streams else {}),
        **model_fields(reader, family, hidden),
    }
    if family.attention == "mla" and fields["norm_eps"] != LATENT_EPS:
        text = f"classes of this model type use eps {LATENT_EPS:g} in the norms of latents; this spec uses norm_eps"
        reader.warn("I0303", "attention", text, reader.place("rms_norm_eps"))
    _report_unread_keys(reader, model_type)
    file_names = {key: name for name, key in family.renamed.items()}
    reader.filled = {file_names.get(key, key): value for key, value in reader.filled.items()}
    _say_defaults(reader, model_type)
    model = None
    if not reader.has_failed:
        model = Model(**fields)
        reader.mistakes += _broken_rules(model, reader.origins)
    return ImportedConfig(
        model_type,
        None if reader.has_failed else model,
        min(original or context, LONGEST),
        tuple(dict.fromkeys(reader.remarks)),
        in_order(reader.mistakes, (source,)),
    )


def _model_type(reader: ConfigReader) -> str:
    """The model type. A type that a spec cannot describe is reported as the only error."""
    value = reader.members.get("model_type")
    families = ", ".join(FAMILIES)
    if value is None or not isinstance(value.value, str):
        message = (
            "`model_type` is missing" if value is None else f"`model_type` must be a text, not {value_text(value)}"
        )
        code = "I0202" if value is None else "I0203"
        reader.complain(code, message, value.span if value else reader.origins[""], f"one of {families}")
        return ""
    name = value.value
    if name not in FAMILIES:
        text_config = reader.members.get("text_config")
        inner = text_config.value.get("model_type") if text_config and isinstance(text_config.value, Mapping) else None
        if inner is not None and isinstance(inner.value, str) and inner.value in FAMILIES:
            hint = "its `text_config` can be imported: put that object into a separate file"
        else:
            hint = suggest(name, tuple(FAMILIES)) if name not in OTHER_TYPES else ""
        why = f": {OTHER_TYPES[name]}" if name in OTHER_TYPES else ""
        message = f"a model of type {value_text(name)} cannot be written as a spec{why}"
        reader.complain("I0201", message, value.span, hint or f"supported types: {families}")
    reader.used.add("model_type")
    return name


def _mtp(reader: ConfigReader, attention: Attention | None) -> Mtp | None:
    """Multi-token prediction. `attention`: that of its block, if it differs from the last layer's."""
    depth = reader.count("num_nextn_predict_layers", 0, 16, 0, "num_mtp_layers")
    if not depth:
        return None
    if depth > 1:
        reader.refuse("mtp", "num_nextn_predict_layers", "a spec predicts one token beyond the next")
    reader.remarks.append(Remark("mtp", f"weight is not in the config: {MTP_WEIGHT} is DeepSeek-V3's first value"))
    return Mtp(depth=1, weight=(Phase(value=MTP_WEIGHT),), attention=attention)


def _report_unread_keys(reader: ConfigReader, model_type: str) -> None:
    """Report keys that are refused, that models of this type do not read, or that are unknown."""
    for name, repeated in REPEATED.items():
        value, original = reader.members.get(name), reader.members.get(repeated)
        if value is not None and original is not None and repeated in reader.used and value.value == original.value:
            reader.used.add(name)
    harmless = {**OF_TYPES, **{name: refused.harmless for name, refused in REFUSED.items()}}
    for name, values in harmless.items():
        value = None if name in reader.used else reader.members.get(name)
        reader.used.add(name)
        matches = (value.value == off and type(value.value) is type(off) for off in values) if value else ()
        if value is None or value.value is None or any(matches):
            continue
        if name in REFUSED and REFUSED[name].is_read(model_type):
            reader.refuse(REFUSED[name].place, name, REFUSED[name].meaning)
        else:
            text = (
                f"`{name}` = {value_text(value)} is not read by models of type {model_type}, and left out of this spec"
            )
            reader.warn("I0302", "model", text, value.key)
    classes = reader.members.get("architectures")
    class_names = classes.value if classes is not None and isinstance(classes.value, tuple) else ()
    for class_name in class_names:
        if not isinstance(class_name.value, str) or not class_name.value.endswith("ForCausalLM"):
            text = f"architectures: {value_text(class_name)}; this spec predicts the next token, as *ForCausalLM does"
            reader.warn("I0303", "model", text, class_name.span)
    for name, value in reader.members.items():
        if name not in reader.used and name not in IRRELEVANT and not name.startswith("_"):
            text = f"`{value_text(name)[1:-1]}` = {value_text(value)} is unknown, and left out of this spec"
            reader.warn("I0302", "model", text, value.key)


def _say_defaults(reader: ConfigReader, model_type: str) -> None:
    """Report the keys that the config leaves out, with the defaults used for them."""
    if reader.filled:
        defaults = ", ".join(f"{name} = {value_text(value)}" for name, value in sorted(reader.filled.items()))
        reader.warn("I0304", "model", f"not in the config, so the defaults of {model_type} are used: {defaults}")


def _broken_rules(model: Model, origins: Mapping[str, Span]) -> list[Diagnostic]:
    """The rules of a spec that the model breaks, located in the config."""
    absent = set(fields_of(Spec)) - {"model"}
    mistakes = rules.check(Spec.model_construct(model=model), origins, absent)
    return [replace(item, hint="") for item in mistakes]

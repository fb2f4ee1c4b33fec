"""The rule behind every code of an import. A code is never given to another rule."""

from __future__ import annotations

CODES = {
    "I0101": "a configuration is a JSON object (RFC 8259)",
    "I0102": "a configuration gives a key once",
    "I0103": "a configuration in Python, YAML or TOML is one",
    "I0104": "a value of a configuration is a literal",
    "I0201": "the model type is one that a spec can describe",
    "I0202": "a configuration has the keys that its model type needs",
    "I0203": "a value has the type and lies within the bounds of its key",
    "I0301": "what a configuration asks for can be written in a spec",
    "I0302": "every key of a configuration is known",
    "I0303": "what is not part of pre-training, or means something else in a spec, is said",
    "I0304": "a key that a configuration leaves out has the default of its model type, which is said",
}
MORE = {
    "I0101": "NaN, Infinity, comments and trailing commas are not JSON, though some programs write them.",
    "I0102": "Other readers take the last of two values without a word.",
    "I0103": "A recipe is parsed, and never run.",
    "I0104": "A warning: nothing is executed, so what is computed is not known. Variables of a script may be given "
    "with -D NAME=VALUE.",
    "I0201": "Models whose architecture differs in more than its numbers are refused, with what is in the way.",
    "I0202": "Sizes are never guessed: they have no default here, though classes of `transformers` have some.",
    "I0203": "Numbers are not converted: 64.0 is no whole number. Keys that are two names of one value agree.",
    "I0301": "An error, as the spec would be of another model. --lossy writes it all the same, with a comment where "
    "something is lost.",
    "I0302": "A warning, and a comment in the spec: the key may change the model, or nothing.",
    "I0303": "A warning, and a comment in the spec: a context that was extended after pre-training, a balancing loss "
    "of another kind.",
    "I0304": "A warning, and a comment in the spec. The defaults are those of the configuration classes of "
    "`transformers`, and of DeepSeek's own for what these do not have, as the loss that balances experts.",
}

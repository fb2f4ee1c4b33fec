"""The rules behind the codes of files that are no specs, and of code that a spec names, with what to know of each.

A code is never given to another rule. Those of specs are in `dsl.rules.codes`.
"""

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
    "S0101": "the schedule of a file is legal, free of deadlock, and of the run's sizes",
    "P0101": "the placement of a file has every expert of every layer once, equally many on each expert rank",
    "R0101": "the rate table of a file is one: classes, shapes and rates as `dsc calibrate` writes them",
    "W0101": "the checkpoint that a run begins with has every parameter of the model, in its shape",
    "M0101": "a module that a spec names can be traced: tensors in, one of the same shape out, nothing beside",
    "M0102": "the file of a reward is Python, and has the function that the reward names",
    "D0101": "the source of the data matches files that hold text",
    "D0102": "the chat template can be read, and marks what the assistant says",
    "D0103": "a source that is filtered is text",
    "D0104": "all files that a source matches are read",
    "D0105": "a file is in one source of a blend",
    "D0106": "a source has enough text for a sample",
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
    "S0101": "A file is in the notation (`dsc schedule SPEC --format text` writes it), in its JSON form, or torch's "
    "CSV. It has the run's pipeline ranks, and the micro-batches of a step at the largest batch; smaller batches of "
    "a ramp run a schedule of dsc on the same stages. Every stage runs F, then B or I and W, once on every "
    "micro-batch; O and R between F and B or I copy what F saved to the host and back. `dsc schedule FILE` checks one "
    "without a spec.",
    "P0101": "`dsc place RUN -o FILE` writes such a file from the load of a run: for each layer the experts of each "
    "device, the moves that lead there, which must agree, and the load. It has the layers of the model, and as many "
    "devices as `parallel.expert`; where that is `auto`, it is as many as the file has. Replicas of an "
    "expert cannot be trained; `dsc place --replicas` plans them for serving.",
    "R0101": "`dsc calibrate -o rates.json` measures one on this machine, and `--trace` makes one from a traced layer; "
    "docs/rates.md has its form. Plans go by it, and so does what follows from them: which layers are on which stage, "
    "a schedule that is searched for, the order inside of overlapped pairs.",
    "W0101": "`train { initial = … }` names a checkpoint, the folder of checkpoints or the run folder whose newest one "
    "is meant. `dsc import hf FOLDER -o SPEC` writes one from published weights. Its weights and balancing biases are "
    "taken; the optimizer, the rate and the data begin anew. What the model does not have is left behind, and said.",
    "M0101": '`ffn custom { module = "layers.py:Mixer" }` names a class of torch.nn.Module, made with the hidden size '
    "and called with tensors of one shape. Its shapes may not depend on numbers. Its forward may neither write into "
    "parameters nor draw random numbers, and it has no buffers. docs/custom-layers.md has an example. `dsc check` "
    "looks for the class, and runs nothing; what plans, compiles and trains runs the file.",
    "M0102": '`rewards { own { check = python, file = "reward.py", function = "reward" } }` names a function. '
    "`dsc check` looks for it, and runs nothing. A build has the file, and no other one beside it; it is run "
    "in a process of its own while the run trains.",
    "D0101": "A warning of `dsc check`, as the text may be elsewhere: `dsc train --data DIR` says where the paths of "
    "the data start. `dsc train` refuses a source that matches nothing. Read are .txt, .md and .py "
    "files whole, .jsonl files with a document a line, also as .jsonl.gz and .jsonl.zst, and .parquet and .arrow files "
    "with a document a row.",
    "D0102": "A warning of `dsc check`, where tokenizer and rows are there: `dsc train` refuses the first row that the "
    "template cannot be used for. The loss of a row of `messages` is on what the template puts between "
    "`{% generation %}` and `{% endgeneration %}`. A template without them would leave the row without a loss.",
    "D0103": "A warning of `dsc check`, where the files are there: `dsc train` refuses to filter files of token ids, "
    "in which there is no text to judge. In a blend, `filters { }` in a source says that it has none.",
    "D0104": "A warning of `dsc check`, by the names of files alone. `dsc data prepare` and `dsc train` say the same, "
    "and count files that are not in UTF-8, too. Files with other suffixes, hidden files and symbolic links are not "
    "read. A pattern that matches no such file, such as `notes/**/*.md`, gives no warning.",
    "D0105": "A warning of `dsc check`, `dsc data prepare` and `dsc train`. Each source of a blend is divided by "
    "itself, so a file in two of them may be held out of one and trained on in the other.",
    "D0106": "A warning of `dsc check`, where the files are there. A sample is `train.sequence` and two tokens more, "
    "and the files of the source have fewer bytes. `dsc train` refuses a text that is shorter than a sample.",
}

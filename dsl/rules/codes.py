"""The rule of every error code. A code is never reused for another rule."""

from __future__ import annotations

from dsl.facts.schedules import AUTO, CHUNKED, EVEN, NEEDED, join_names

_NEEDED = ", ".join(f"{count} for {join_names(names)}" for count, names in NEEDED.items())
CODES = {
    # the text
    "E0101": "a spec is a readable UTF-8 text file",
    "E0102": "a spec has at most 1 MiB of text, 40,000 words and 256 blocks, and imports 64 files or 100,000 words",
    "E0103": "brackets, arithmetic, references and `extends` are nested at most 100 deep",
    "E0104": "a number has at most 40 characters and an exponent of at most 330, a name 64 characters, a string 4,096",
    "E0105": "a spec has only characters of the language, and strings only visible characters",
    "E0106": "a string ends on its line",
    "E0107": "every brace, bracket and parenthesis is closed",
    "E0108": 'a statement is `key = value`, `block { … }`, `import "file"`, `let name = value` or a phase',
    # keys and blocks
    "E0201": "a block has only the keys of its schema",
    "E0202": "a key, block or let is given once, and built-in names are not redefined",
    "E0203": "a key without a default must be given",
    "E0204": "a block is written `key { … }`, a value `key = value`",
    "E0205": "a block with kinds has a kind before its brace, a named block a name, and other blocks nothing",
    # values
    "E0301": "a value has the unit of its key",
    "E0302": "a value has the type of its key",
    "E0303": "a number lies within its bounds",
    "E0304": "a word is one of the choices of its key",
    "E0305": "the units of arithmetic match, and nothing is divided by zero",
    # names
    "E0401": "every name is defined",
    "E0402": "a definition does not depend on itself",
    "E0403": "a block inherits from the parent's only block of its kind",
    "E0404": "a spec to run has a run block; if it has several, one is chosen",
    # files and the command line
    "E0501": "an imported file exists and can be read",
    "E0502": "imports form no cycle",
    "E0503": "an import is a relative path to a .dsc file",
    "E0504": "an override is written key=value, with the key as it is nested in the run",
    # layers and phases
    "E0701": "layer ranges leave no gap",
    "E0702": "layer ranges do not overlap",
    "E0703": "phases end one after the other, and the last has no end",
    "E0704": "a phase of the learning rate has a shape, a target and an end",
    "E0705": "the phases of the learning rate cover the run, and the run reaches each of them",
    "E0706": "a batch grows, in at most 10,000 sizes",
    "E0707": "a phase of a run reads whole pieces of the text, as long as the longest sequence of the run",
    "E0708": "a phase does not change settings of the whole run",
    # parallelism
    "E0801": "world = pipeline·data·tensor·context",
    "E0802": "expert divides data·tensor·context",
    "E0803": "expert divides the number of experts",
    "E0804": f"{join_names(EVEN)} needs an even number of pipeline ranks",
    "E0805": f"the largest batch has enough micro-batches per pipeline rank: {_NEEDED}",
    "E0806": f"{join_names(EVEN)} needs an even number of micro-batches",
    "E0807": "the batch is a multiple of data·micro_batch",
    "E0808": "a stage has a layer, the embedding or the head",
    "E0809": "context ranks split every sequence into equal chunks",
    "E0810": "zero = 2 and 3 need an elementwise optimizer, and zero = 3 weights without low-precision copies",
    "E0811": "a run plans at most 262,144 micro-batches, over all stages and batch sizes",
    "E0812": "the memory of a device holds at least its weights, gradients and optimizer state",
    "E0813": "a schedule has either a name or a file",
    "E0814": f"chunks are for {join_names(CHUNKED)}, a cap is for {AUTO}",
    "E0815": "a layout has every layer of the model, on as many stages as the schedule has",
    "E0816": "a placement needs experts that are spread over several ranks",
    "E0817": "the data ranks of a pipeline rank are on devices of one kind",
    "E0818": "with route = nodes, expert groups fill whole nodes, and rows come back in 16 bits or more",
    "E0819": "tensor ranks split attention, dense layers and experts into equal parts",
    "E0820": "a list of caps has one number for each pipeline rank",
    "E0821": "`shard` divides the data ranks into groups that hold whole expert groups and shard gradients",
    # the model
    "E0901": "groups divide the experts",
    "E0902": "the groups of a token hold at least top_k experts",
    "E0903": "the rotated width of a head is even",
    "E0904": "mtp depth is 1",
    "E0905": "top_groups is at most groups",
    "E0906": "the model's vocabulary is at least as large as the tokenizer's",
    "E0907": "communication leaves at least one SM for compute",
    "E0908": "kv_heads and key_heads divide heads",
    "E0909": "every role in e4m3 or e2m1 has a tile, whose elements share a scale",
    "E0910": "a linear in e4m3 or e2m1 sums over a multiple of 16",
    "E0911": "e4m3 is for linear, dispatch and combine, e2m1 for linear, e5m6 for attention_output",
    "E0912": "promote is a multiple of the columns of a tile",
    "E0913": "recompute, unfused and kernels name ops that the run has",
    "E0914": "communication needs a device that states its SMs",
    "E0915": "a run that validates holds out documents",
    "E0916": "every kind of device can multiply in the dtype of linears",
    "E0917": "a device has peak rates, or is a CPU",
    "E0918": "only a run that validates can keep the best checkpoints",
    "E0919": "checkpoints to keep forever are among those that are saved",
    "E0920": "high leaves at least one layer whose linears are in low precision",
    "E0921": "tiles and scales match a format, and the only low-precision format for token rows is FP8 blocks",
    "E0922": "the experts of a token are on at most max_nodes nodes",
    "E0923": "a run that validates a moving average also keeps it",
    "E0924": "offload names state that the run has",
    "E0925": "a head has at least as many columns as rope rotates",
    "E0926": "the two numbers of turns between which frequencies are scaled are in order",
    "E0927": "recompute_layers needs `layer` in recompute, and at least as many layers",
    "E0928": "checkpoints go to the folder of the run and to other places, each named once",
    "E0929": "a rollback has a checkpoint to go back to",
    "E0930": "keys of a feed-forward part apply to its activation, shared experts and choice of experts",
    "E0931": "conversations are lines of files in one source, with a tokenizer.json",
    "E0932": "the weights of sources are proportional to whole numbers that sum to at most 100,000",
    "E0933": "fill-in-the-middle needs documents and a tokenizer; end_id is only for token ids without a tokenizer",
    "E0934": "filters need documents of text, and can leave some of them",
    "E0935": "groups divide the heads of compressed attention",
    "E0936": "a sequence is at least as long as an entry of compressed attention",
    "E0940": "adapters are trained beside the weights of a checkpoint",
    "E0941": "adapters are on matrices that the model has",
    "E0942": "the rank of an adapter is at most the smaller dimension of each of its matrices",
    "E0943": "adapters of routed experts need token rows in the dtype of activations",
    "E0944": "zero = 3 shards only trained weights",
    "E0945": "a library computes the ops that `kernels` names it for",
    "E0946": "graphs are captured on accelerators, of segments whose weights are not gathered",
    "E0950": "an indexer needs a query latent, and a head at least as wide as the part that rope rotates",
    "E0951": "with `only`, the model has that part, and nothing else is trained",
    "E0952": "qk_clip needs trained weights of queries and keys, without norms",
    # learning from rewards
    "E0960": "grpo needs prompts, and prompts need grpo",
    "E0961": "prompts are rows of files in one source, with a tokenizer.json",
    "E0962": "a step has whole groups of completions, and steps on the same completions have the same size",
    "E0963": "a prompt and its completion fit into a sequence",
    "E0964": "a reward has the keys that its check reads, and no others; at least one weight is not 0",
    # valid specs that cannot be compiled and trained yet
    "E1001": "training runs in fp64, fp32, bf16, fp8_block, mxfp8 or nvfp4",
    "E1006": "training in mxfp8, nvfp4 and other formats without kernels runs only on CPUs",
    "E1005": "a tokenizer is trained on the data, or read from a file",
    "E1007": "compressed and custom attention cannot mask documents",
    "E1008": "completions are generated on CPUs, in fp32 or bf16, by unsplit layers with mla or gqa",
    "E1010": "a run of other software can only be planned",
    "E1009": "tensor ranks multiply in low-precision formats only in FP8 blocks",
}
# Rules that no longer apply. Their codes are never reused.
RETIRED = {
    "E1002": "training ran only with a sigmoid router; softmax routers train too",
    "E1003": "training ran only without recompute; now the named ops are recomputed",
    "E1004": "training ran with only two of the schedules; now it runs with all",
}


# --- Codes of files that are no specs, and of code that a spec names: the rule of each, and a paragraph about it
#
# A code is never reused for another rule.

FILE_CODES = {
    "I0101": "a configuration is a JSON object (RFC 8259)",
    "I0102": "a configuration gives a key once",
    "I0103": "a configuration is valid Python, YAML or TOML",
    "I0104": "a value of a configuration is a literal",
    "I0201": "the model type is one that a spec can describe",
    "I0202": "a configuration has the keys that its model type needs",
    "I0203": "a value has the type of its key and is within its bounds",
    "I0301": "what a configuration asks for can be written in a spec",
    "I0302": "every key of a configuration is known",
    "I0303": "keys that are not part of pre-training, or mean something else in a spec, are reported",
    "I0304": "a key that a configuration leaves out has the default of its model type, which is reported",
    "S0101": "a schedule file is valid, free of deadlock, and fits the sizes of the run",
    "P0101": "a placement file has every expert of every layer once, and equally many on each expert rank",
    "R0101": "a rate table file has classes, shapes and rates in the format of `dsc calibrate`",
    "W0101": "the initial checkpoint has every parameter of the model, in its shape",
    "M0101": "a custom module can be traced: tensors in, one tensor of the same shape out, no side effects",
    "M0102": "the file of a reward is Python and defines its function",
    "D0101": "the data source matches files with text",
    "D0102": "the chat template can be read, and marks the assistant's text",
    "D0103": "a source with filters is text",
    "D0104": "all files that a source matches can be read",
    "D0105": "a file is in only one source of a blend",
    "D0106": "a source has enough text for a sample",
}
DETAILS = {
    "I0101": "NaN, Infinity, comments and trailing commas are not JSON, although some programs write them.",
    "I0102": "Other readers silently take the last of two values.",
    "I0103": "A recipe is parsed, never executed.",
    "I0104": "A warning: nothing is executed, so computed values are unknown. Give variables of a script with -D "
    "NAME=VALUE.",
    "I0201": "A model whose architecture differs in more than its numbers is refused, with the reason.",
    "I0202": "Sizes are never guessed: they have no default here, although `transformers` has defaults for some.",
    "I0203": "Numbers are not converted: 64.0 is not a whole number. Two keys for the same value must agree.",
    "I0301": "An error, since the spec would describe another model. --lossy writes it anyway, with a comment where "
    "something is lost.",
    "I0302": "A warning, and a comment in the spec: the key may or may not change the model.",
    "I0303": "A warning, and a comment in the spec: a context that was extended after pre-training, a balancing loss "
    "of another kind.",
    "I0304": "A warning, and a comment in the spec. The defaults come from the configuration classes of "
    "`transformers`, or, if these lack the key, from DeepSeek's own, such as the balancing loss of experts.",
    "S0101": "A file is in the text notation (`dsc schedule SPEC --format text` writes it), its JSON form, or "
    "torch's CSV. It has the pipeline ranks of the run, and the micro-batches of a step at the largest batch; "
    "smaller batches of a ramp run a schedule of dsc on the same stages. Every stage runs F, then B or I and W, once "
    "for every micro-batch; O and R between F and B or I copy what F saved to the host and back. `dsc schedule FILE` "
    "checks a file without a spec.",
    "P0101": "`dsc place RUN -o FILE` writes such a file from the load of a run: for each layer the experts of each "
    "device, the moves that lead there, which must agree, and the load. It has the layers of the model, and as many "
    "devices as `parallel.expert`; with `auto`, the file decides the degree. Each expert has one place: "
    "replicas cannot be trained.",
    "R0101": "`dsc calibrate -o rates.json` measures one on this machine, and `--trace` makes one from a traced layer; "
    "docs/rates.md describes its format. Plans use it, and so do the split of layers over stages, the search for a "
    "schedule, and the order inside overlapped pairs.",
    "W0101": "`train { initial = … }` names a checkpoint, or a folder of checkpoints or run folder, for the newest "
    "in it. `dsc import hf FOLDER -o SPEC` writes a checkpoint from published weights. Its weights and balancing "
    "biases are read; the optimizer, the rate and the data start anew. Tensors that the model does not have are left "
    "out and reported.",
    "M0101": '`ffn custom { module = "layers.py:Mixer" }` names a class of torch.nn.Module, constructed with the '
    "hidden size and called with tensors of one shape. Its shapes may not depend on values. Its forward may neither "
    "write to parameters nor draw random numbers, and it has no buffers. docs/custom-layers.md has an example. `dsc "
    "check` looks for the class and runs nothing; planning, compiling and training run the file.",
    "M0102": '`rewards { own { check = python, file = "reward.py", function = "reward" } }` names a function. '
    "`dsc check` looks for it and runs nothing. A build contains only this file, not those beside it; training runs it "
    "in a separate process.",
    "D0101": "A warning of `dsc check`, since the text may be elsewhere: with `dsc train --data DIR`, the paths of "
    "the data start at DIR. `dsc train` refuses a source that matches nothing. A document is a .txt, .md or .py "
    "file, a line of a .jsonl, .jsonl.gz or .jsonl.zst file, or a row of a .parquet or .arrow file.",
    "D0102": "A warning of `dsc check`, if tokenizer and rows exist: `dsc train` refuses the first row that the "
    "template cannot render. The loss of a row of `messages` is on the text between `{% generation %}` and "
    "`{% endgeneration %}`. Without these, the row would have no loss.",
    "D0103": "A warning of `dsc check`, if the files exist: `dsc train` refuses to filter files of token ids, which "
    "have no text. In a blend, `filters { }` turns the filters off for a source.",
    "D0104": "A warning of `dsc check`, from the names of files alone. `dsc data prepare` and `dsc train` give it "
    "too, and also count files that are not UTF-8. Files with other suffixes, hidden files and symbolic links are "
    "not read. A pattern that matches no such file, such as `notes/**/*.md`, gives no warning.",
    "D0105": "A warning of `dsc check`, `dsc data prepare` and `dsc train`. Each source of a blend is split on its "
    "own, so a file in two of them may be held out in one and trained on in the other.",
    "D0106": "A warning of `dsc check`, if the files exist. A sample has `train.sequence` tokens and two more, and "
    "the files of the source have fewer bytes. `dsc train` refuses a text that is shorter than a sample.",
}

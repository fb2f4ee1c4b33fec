"""The rule behind every code. A code is never given to another rule."""

from __future__ import annotations

from dsl.facts.schedules import AUTO, CHUNKED, EVEN, NEEDED, in_words

_NEEDED = ", ".join(f"{count} under {in_words(names)}" for count, names in NEEDED.items())
CODES = {
    # the text
    "E0101": "a spec is a readable file of UTF-8 text",
    "E0102": "a spec has at most 1 MiB of text, 40,000 words and 256 blocks, and imports 64 files or 100,000 words",
    "E0103": "brackets, arithmetic, references and `extends` are nested at most 100 deep",
    "E0104": "a number has at most 40 characters and an exponent of at most 330, a name 64 characters, a string 4,096",
    "E0105": "a character that the language does not have, or that cannot be seen in a string",
    "E0106": "a string ends on its line",
    "E0107": "every brace, bracket and parenthesis has its partner",
    "E0108": 'a statement is `key = value`, `block { … }`, `import "file"`, `let name = value` or a phase',
    # keys and blocks
    "E0201": "a block has only the keys of its schema",
    "E0202": "a key, block or let is given once, and nothing that is built in is defined again",
    "E0203": "a key without a default must be given",
    "E0204": "a block is written `key { … }`, a value `key = value`",
    "E0205": "a block that comes in kinds, or is named, says which, and nothing more before its brace",
    # values
    "E0301": "a value has the unit of its key",
    "E0302": "a value has the type of its key",
    "E0303": "a number lies within its bounds",
    "E0304": "a word is one of the choices of its key",
    "E0305": "arithmetic is on numbers of fitting units, and does not divide by zero",
    # names
    "E0401": "a name must have been defined",
    "E0402": "a definition does not depend on itself",
    "E0403": "a block inherits from the only block of its kind",
    "E0404": "a spec to run has a run block, and says which where there are several",
    # files and the command line
    "E0501": "an imported file exists and can be read",
    "E0502": "imports form no cycle",
    "E0503": "an import is a relative path to a .dsc file",
    "E0504": "an override is written key=value, with the key as it is nested in the run",
    # layers and phases
    "E0701": "layer ranges leave no hole",
    "E0702": "layer ranges do not overlap",
    "E0703": "phases end one after the other, and the last has no end",
    "E0704": "a phase of the learning rate has a shape, a goal and an end",
    "E0705": "the phases of the learning rate cover the run, and each is reached",
    "E0706": "a batch grows, in at most 10,000 sizes",
    "E0707": "a phase of a run reads whole pieces of the text, as long as the longest sequence of the run",
    "E0708": "a phase of a run changes nothing that the whole run has",
    # parallelism
    "E0801": "world = pipeline·data·tensor·context",
    "E0802": "expert divides data·tensor·context",
    "E0803": "expert divides the number of experts",
    "E0804": f"there is an even number of pipeline ranks under {in_words(EVEN)}",
    "E0805": f"the largest batch has enough micro-batches for each pipeline rank: {_NEEDED}",
    "E0806": f"there is an even number of micro-batches under {in_words(EVEN)}",
    "E0807": "the batch is a multiple of data·micro_batch",
    "E0808": "a stage has a layer, the embedding or the head",
    "E0809": "context ranks have equal parts of sequences",
    "E0810": "zero = 2 and 3 divide state by elements, and no copies of weights in few bits",
    "E0811": "at most 262,144 micro-batches are planned, over all stages and sizes of the batch",
    "E0812": "the memory of a device holds at least its weights, gradients and optimizer state",
    "E0813": "a schedule has a name, or is read from a file",
    "E0814": f"chunks are for {in_words(CHUNKED)}, a cap is for {AUTO}",
    "E0815": "a layout has every layer of the model, on as many stages as the schedule runs",
    "E0816": "a placement is of experts that are spread over ranks",
    "E0817": "the data ranks of a pipeline rank are on devices of one kind",
    "E0818": "rows go through nodes that expert groups fill, and come back in 16 bits or more",
    "E0819": "tensor ranks split attention, dense layers and experts in equal parts",
    "E0820": "a list of caps has one for each pipeline rank",
    # the model
    "E0901": "groups divide the experts",
    "E0902": "a token finds top_k experts in its groups",
    "E0903": "the rotated width of a head is even",
    "E0904": "mtp depth is 1",
    "E0905": "top_groups is at most groups",
    "E0906": "the vocabulary of the model holds that of the tokenizer",
    "E0907": "communication leaves compute at least one SM",
    "E0908": "kv_heads, and key_heads, divides heads",
    "E0909": "what is e4m3 or e2m1 has the tile whose elements share a scale",
    "E0910": "a linear in e4m3 or e2m1 sums over a multiple of 16",
    "E0911": "e4m3 is for linear, dispatch and combine, e2m1 for linear, e5m6 for attention_output",
    "E0912": "promote is a multiple of the columns of a tile",
    "E0913": "recompute and unfused name ops that the run has",
    "E0914": "communication takes SMs of a device that states them",
    "E0915": "a run that validates holds documents out",
    "E0916": "linears are in a dtype that every kind of device multiplies in",
    "E0917": "a device has the peaks of an accelerator, or is a CPU",
    "E0918": "the best checkpoints are those of a run that validates",
    "E0919": "checkpoints kept for ever are among those that are saved",
    "E0920": "high leaves a layer whose linears are in few bits",
    "E0921": "tiles and scales are those of a format, and rows are sent in blocks of FP8 alone",
    "E0922": "the experts of a token lie on at most max_nodes nodes",
    "E0923": "a moving average that is validated is kept",
    "E0924": "offload names state that the run has",
    "E0925": "the rotated columns are columns of a head",
    "E0926": "frequencies are scaled between two numbers of turns, the lower one first",
    "E0927": "layers that are counted are run again",
    "E0928": "checkpoints go to the folder of the run and to other places, each named once",
    "E0929": "a rollback finds a checkpoint to go back to",
    "E0930": "keys of a feed-forward part are about what it has",
    "E0931": "conversations are lines of files of one source, in the tokens of a tokenizer.json",
    "E0932": "the weights of sources are whole numbers in proportion, which sum to 100,000 at most",
    "E0933": "documents are filled in the middle in the tokens of a tokenizer, and token ids end by one of them",
    "E0934": "filters are of documents of text, and leave some of them",
    "E0935": "groups divide the heads of compressed attention",
    "E0936": "a sequence is as long as the tokens of an entry of compressed attention",
    "E0940": "adapters are trained beside the weights of a checkpoint",
    "E0941": "adapters are on matrices that the model has",
    "E0942": "the rank of an adapter is at most the smaller extent of the matrices that it is on",
    "E0943": "adapters of routed experts read rows in the dtype of activations",
    "E0944": "zero = 3 divides weights that are trained",
    "E0950": "an indexer reads the latent of queries, and rotates as many columns as a head of attention",
    "E0951": "what alone is trained is there, and is all that is",
    "E0952": "logits are clipped by queries and keys that are trained, and not normed",
    # learning from rewards
    "E0960": "completions are written to prompts, and prompts are for completions",
    "E0961": "prompts are rows of files of one source, in the tokens of a tokenizer.json",
    "E0962": "a step has whole groups of completions, and steps on the same completions have one size",
    "E0963": "a prompt and its completion fit into a sequence",
    "E0964": "a reward has what its check reads, and nothing else; some reward counts",
    # what is right, and cannot be compiled and trained yet
    "E1001": "training runs in fp64, fp32, bf16, fp8_block, mxfp8 or nvfp4",
    "E1006": "training in mxfp8, nvfp4 and other formats without kernels runs on CPUs",
    "E1005": "a tokenizer is trained, or is a file",
    "E1007": "attention that is compressed, or a module, sees all documents of a sequence",
    "E1008": "completions are generated on CPUs, in fp32 or bf16, by whole layers of mla or gqa",
}
# Rules that no longer hold. Their codes are never given to other rules.
RETIRED = {
    "E1002": "training ran with a sigmoid gate only; softmax gates train too",
    "E1003": "training ran without recompute only; what is named is computed again",
    "E1004": "training ran under two of the schedules only; every one trains",
}


# --- The rules behind the codes of files that are no specs, and of code that a spec names, with what to know of each
#
# A code is never given to another rule. Those of specs are in `dsl.rules.codes`.

FILE_CODES = {
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

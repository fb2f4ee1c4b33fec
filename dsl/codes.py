"""The rule behind every code. A code is never given to another rule."""

from __future__ import annotations

from dsl.schedules import AUTO, CHUNKED, EVEN, NEEDED, in_words

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
    # the model
    "E0901": "groups divide the experts",
    "E0902": "a token finds top_k experts in its groups",
    "E0903": "the rotated width of a head is even",
    "E0904": "mtp depth is 1",
    "E0905": "top_groups is at most groups",
    "E0906": "the vocabulary of the model holds that of the tokenizer",
    "E0907": "communication leaves compute at least one SM",
    "E0908": "kv_heads divides heads",
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
    "E0930": "keys of a feed-forward part are about what it has",
    "E0931": "conversations are lines of files of one source, in the tokens of a tokenizer.json",
    "E0932": "the weights of sources are whole numbers in proportion, which sum to 100,000 at most",
    "E0940": "adapters are trained beside the weights of a checkpoint",
    "E0941": "adapters are on matrices that the model has",
    "E0942": "the rank of an adapter is at most the smaller extent of the matrices that it is on",
    "E0943": "adapters of routed experts read rows in the dtype of activations",
    "E0944": "zero = 3 divides weights that are trained",
    # what is right, and cannot be compiled and trained yet
    "E1001": "training runs in fp64, fp32, bf16, fp8_block, mxfp8 or nvfp4",
    "E1006": "training in mxfp8, nvfp4 and other formats without kernels runs on CPUs",
    "E1005": "a tokenizer is trained, or is a file",
    "E1007": "attention that is a module sees all documents of a sequence",
}

# Rules that no longer hold. Their codes are never given to other rules.
RETIRED = {
    "E1002": "training ran with a sigmoid gate only; softmax gates train too",
    "E1003": "training ran without recompute only; what is named is computed again",
    "E1004": "training ran under two of the schedules only; every one trains",
}

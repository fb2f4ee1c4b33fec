"""The training data: one source or several, and the tokenizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, DerivedDefault, FilePath, Node, QuietField, RequiredUnless, Syntax

MAX_CHARACTERS = 64 << 20  # the most bytes a document may have


class TrainTokenizer(Node):
    """A byte-level BPE trained on the data, written `train(vocab)`."""

    vocab: Annotated[int, Field(ge=257, le=16_777_216, description="entries, the 256 bytes among them")]


class Chat(Node):
    """Conversations for supervised fine-tuning. Rows are .jsonl lines with `messages`, or with `prompt` and
    `completion`, and perhaps `tools`; the loss is on the assistant's tokens."""

    template: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="Jinja chat template that marks the assistant's text by `{% generation %}`; default: "
            "chat_template.jinja, or the template in tokenizer_config.json, in the folder of the tokenizer",
            examples=['template = "chat_template.jinja"'],
        ),
    ] = None
    long: Annotated[
        Literal["cut", "drop"],
        Field(description="what to do with a row that is longer than a sequence", examples=["long = cut"]),
        Choices({"cut": "keep its first tokens", "drop": "leave it out"}),
    ] = "cut"
    pack: Annotated[
        bool,
        Field(
            description="whether a sequence holds several rows, each attending only to itself",
            examples=["pack = true"],
        ),
    ] = False


class Prompts(Node):
    """Prompts for reinforcement learning: a row has a prompt, as text or as messages, and an answer."""

    prompt: Annotated[
        str,
        Field(
            min_length=1,
            max_length=256,
            description="key of the prompt in a row: text, which is used as it is, or messages, which go through the "
            "chat template",
            examples=['prompt = "question"'],
        ),
    ] = "prompt"
    answer: Annotated[
        str | None,
        DerivedDefault(
            "the first of `answer`, `solution`, `ground_truth`, `label` and `reward_model.ground_truth` in a row"
        ),
        Field(
            min_length=1,
            max_length=256,
            description="key of the answer in a row; dots separate nested keys",
            examples=['answer = "reward_model.ground_truth"'],
        ),
    ] = None


class Filters(Node):
    """Filters that leave out documents, before the text is split and encoded. They apply in the order of these keys,
    and the first that a document fails is counted."""

    shortest: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_CHARACTERS,
            description="fewest characters of a document; none: no limit",
            examples=["shortest = 200"],
        ),
    ] = None
    longest: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_CHARACTERS,
            description="most characters of a document; none: no limit",
            examples=["longest = 100K"],
        ),
    ] = None
    quality: Annotated[
        Literal["gopher"] | None,
        Field(description="quality rules on the text of a document, or none", examples=["quality = gopher"]),
        Choices(
            {
                "gopher": "the rules of Gopher (arXiv 2112.11446, table A1) that need no word list: on number and "
                "length of words, symbols, bullets, letters and repetitions"
            }
        ),
    ] = None
    duplicates: Annotated[
        Literal["exact", "near"] | None,
        Field(
            description="which duplicates of earlier documents in the source to leave out, or none",
            examples=["duplicates = near"],
        ),
        Choices(
            {
                "exact": "documents that are equal except for white space",
                "near": "these, and documents whose MinHash similarity is at least `similarity`",
            }
        ),
    ] = None
    similarity: Annotated[
        float,
        Field(
            ge=0.5,
            le=1,
            description="Jaccard similarity of five-word shingles at and above which two documents are near duplicates",
            examples=["similarity = 0.8"],
        ),
    ] = 0.8


class DataSource(Node):
    """A source of a blend: its files, and its share of the samples."""

    name: Annotated[str, Syntax("label"), Field(description="name of the source")]
    files: Annotated[
        str,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="a path, a glob, or python_stdlib, as in `source`",
            examples=['files = "web/*.jsonl"'],
        ),
    ]
    weight: Annotated[
        float,
        Field(
            ge=0,
            le=1_000_000,
            description="its share of the samples, relative to the weights of all sources; 0: unused, unless a phase "
            "sets a weight",
            examples=["weight = 0.7"],
        ),
    ]
    fim: Annotated[
        float | None,
        DerivedDefault("from `data`"),
        QuietField(),
        Field(
            ge=0,
            le=1,
            description="share of the documents of this source that become fill-in-the-middle examples",
            examples=["fim = 50%"],
        ),
    ] = None
    filters: Annotated[
        Filters | None,
        DerivedDefault("from `data`"),
        QuietField(),
        Field(
            description="filters of this source, instead of those of `data`",
            examples=["filters { duplicates = exact }"],
        ),
    ] = None


class Data(Node):
    """The training data. Paths are relative to the folder of the spec."""

    source: Annotated[
        str | None,
        FilePath(),
        RequiredUnless("sources"),
        DerivedDefault("none, if `sources` are given"),
        Field(
            min_length=1,
            max_length=4096,
            description="a file, a folder, a glob, or python_stdlib; a document is a .txt, .md or .py file, a line "
            "of .jsonl, .jsonl.gz or .jsonl.zst, or a row of .parquet or .arrow; NAME.idx and NAME.bin hold token "
            "ids, in the format of Megatron",
            examples=["source = python_stdlib"],
        ),
    ] = None
    sources: Annotated[
        tuple[DataSource, ...],
        Syntax("entries"),
        QuietField(),
        Field(
            description="several sources instead of one, each with its weight",
            examples=[
                'sources { web { files = "web/*.jsonl", weight = 0.7 }, code { files = "code/**/*.py", weight = 0.3 } }'
            ],
        ),
    ] = ()
    tokenizer: Annotated[
        str | TrainTokenizer | None,
        Syntax("tokenizer"),
        FilePath(),
        RequiredUnless("end_id"),
        DerivedDefault("none, if `end_id` is given"),
        Field(description="path of a tokenizer.json, or train(vocab)", examples=["tokenizer = train(4096)"]),
    ] = None
    validation: Annotated[
        float, Field(ge=0, lt=1, description="share of the documents to hold out", examples=["validation = 5%"])
    ] = 0.0
    chat: Annotated[
        Chat | None,
        Field(
            description="the rows are conversations, in .jsonl files; without it, documents",
            examples=["chat { long = cut }"],
        ),
    ] = None
    documents: Annotated[
        Literal["joined", "masked"],
        Field(
            description="whether a token attends to other documents in its sequence", examples=["documents = masked"]
        ),
        Choices(
            {
                "joined": "a token attends to all tokens before it, across documents",
                "masked": "a token attends only to its own document, positions start at 0 in each; the first token "
                "of a document is not predicted",
            }
        ),
    ] = "joined"
    column: Annotated[
        str,
        Field(
            min_length=1,
            max_length=256,
            description="key (.jsonl) or column (.parquet, .arrow) with the text of a row",
            examples=['column = "content"'],
        ),
        QuietField(),
    ] = "text"

    fim: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="share of the training documents that become fill-in-the-middle examples: their middle moves "
            "to the end",
            examples=["fim = 0.1"],
        ),
        QuietField(),
    ] = 0.0
    end_id: Annotated[
        int | None,
        DerivedDefault("from the tokenizer"),
        Field(
            ge=0,
            le=16_777_215,
            description="id of the end-of-document token in files of token ids, if no tokenizer is given",
            examples=["end_id = 50256"],
        ),
        QuietField(),
    ] = None
    filters: Annotated[
        Filters | None,
        Field(
            description="filters that leave out documents; in a blend, for the sources without filters of their own",
            examples=["filters { shortest = 200, quality = gopher, duplicates = near }"],
        ),
        QuietField(),
    ] = None
    prompts: Annotated[
        Prompts | None,
        QuietField(),
        Field(
            description="the rows are prompts for `train.grpo`; without it, documents or conversations",
            examples=["prompts { }", 'prompts { prompt = "question", answer = "solution" }'],
        ),
    ] = None

    @property
    def patterns(self) -> dict[str, str]:
        """The files to read, by the path of the key that names them."""
        if self.source is not None:
            return {"data.source": self.source}
        return {f"data.sources.{source.name}.files": source.files for source in self.sources}

    @property
    def pads_rows(self) -> bool:
        """Whether sequences may end in padding: a conversation or a completion is seldom as long as a sequence."""
        return self.chat is not None or self.prompts is not None

    @property
    def masks_documents(self) -> bool:
        """Whether attention gets the starts of documents."""
        return self.documents == "masked" or (self.chat is not None and self.chat.pack)

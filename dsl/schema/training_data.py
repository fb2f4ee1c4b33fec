"""The text that a run is trained on: one source or several, and its tokenizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, Derived, FilePath, Node, Quiet, Syntax, Unless

MAX_CHARACTERS = 64 << 20  # a document has no more bytes


class TrainTokenizer(Node):
    """A byte-level BPE trained on the data, written `train(vocab)`."""

    vocab: Annotated[int, Field(ge=257, le=16_777_216, description="entries, the 256 bytes among them")]


class Chat(Node):
    """Conversations for supervised fine-tuning. Rows are lines of .jsonl: `messages`, or `prompt` and `completion`, and
    `tools`; the loss is on what the assistant says."""

    template: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="the chat template in jinja, which marks what the assistant says by `{% generation %}`; "
            "else chat_template.jinja beside the tokenizer, or the template in tokenizer_config.json there",
            examples=['template = "chat_template.jinja"'],
        ),
    ] = None
    long: Annotated[
        Literal["cut", "drop"],
        Field(description="what becomes of a row with more tokens than a sequence", examples=["long = cut"]),
        Choices({"cut": "its first tokens are kept", "drop": "it is left out"}),
    ] = "cut"
    pack: Annotated[
        bool,
        Field(
            description="whether a sequence holds several rows, each of which sees itself alone",
            examples=["pack = true"],
        ),
    ] = False


class Prompts(Node):
    """Prompts that completions are written to: a row has a prompt, as text or as messages, and its answer."""

    prompt: Annotated[
        str,
        Field(
            min_length=1,
            max_length=256,
            description="where the prompt of a row is: text, which is taken as it is, or messages, which go through "
            "the chat template",
            examples=['prompt = "question"'],
        ),
    ] = "prompt"
    answer: Annotated[
        str | None,
        Derived(
            "the first that a row has of `answer`, `solution`, `ground_truth`, `label` and `reward_model.ground_truth`"
        ),
        Field(
            min_length=1,
            max_length=256,
            description="where the answer of a row is; dots go into objects",
            examples=['answer = "reward_model.ground_truth"'],
        ),
    ] = None


class Filters(Node):
    """Which documents are left out, before the text is divided and encoded. A document goes through the filters in the
    order of these keys, and the first that it does not pass is counted."""

    shortest: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_CHARACTERS,
            description="characters of a document, at least; none: any number",
            examples=["shortest = 200"],
        ),
    ] = None
    longest: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_CHARACTERS,
            description="characters of a document, at most; none: any number",
            examples=["longest = 100K"],
        ),
    ] = None
    quality: Annotated[
        Literal["gopher"] | None,
        Field(description="rules on the text of a document, or none", examples=["quality = gopher"]),
        Choices(
            {
                "gopher": "those of Gopher (arXiv 2112.11446, table A1) that need no list of words: on the number and "
                "length of words, symbols, bullets, letters and repetitions"
            }
        ),
    ] = None
    duplicates: Annotated[
        Literal["exact", "near"] | None,
        Field(
            description="which documents of the source are left out because one before them is alike, or none",
            examples=["duplicates = near"],
        ),
        Choices(
            {
                "exact": "those that are equal but for white space",
                "near": "these, and those whose similarity is at least `similarity`, by MinHash",
            }
        ),
    ] = None
    similarity: Annotated[
        float,
        Field(
            ge=0.5,
            le=1,
            description="Jaccard similarity of the runs of five words of two documents, from which on they are near "
            "duplicates",
            examples=["similarity = 0.8"],
        ),
    ] = 0.8


class DataSource(Node):
    """A source of a blend: its files, and how much of the samples is of it."""

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
            description="its share of the samples, of the weights of all sources together; 0: none, until a phase",
            examples=["weight = 0.7"],
        ),
    ]
    fim: Annotated[
        float | None,
        Derived("that of `data`"),
        Quiet(),
        Field(
            ge=0,
            le=1,
            description="share of the documents of this source whose middle is moved to their end",
            examples=["fim = 50%"],
        ),
    ] = None
    filters: Annotated[
        Filters | None,
        Derived("those of `data`"),
        Quiet(),
        Field(
            description="which documents of this source are left out, in the place of what `data` says",
            examples=["filters { duplicates = exact }"],
        ),
    ] = None


class Data(Node):
    """Where the text comes from. Paths are those from the folder of the spec."""

    source: Annotated[
        str | None,
        FilePath(),
        Unless("sources"),
        Derived("none, where `sources` are given"),
        Field(
            min_length=1,
            max_length=4096,
            description="a file, a folder, a glob, or python_stdlib; .txt, .md and .py files are documents, and so are "
            "lines of .jsonl, .jsonl.gz and .jsonl.zst, and rows of .parquet and .arrow; NAME.idx and NAME.bin are "
            "token ids, as Megatron writes them",
            examples=["source = python_stdlib"],
        ),
    ] = None
    sources: Annotated[
        tuple[DataSource, ...],
        Syntax("entries"),
        Quiet(),
        Field(
            description="several sources in the place of one, each with its weight",
            examples=[
                'sources { web { files = "web/*.jsonl", weight = 0.7 }, code { files = "code/**/*.py", weight = 0.3 } }'
            ],
        ),
    ] = ()
    tokenizer: Annotated[
        str | TrainTokenizer | None,
        Syntax("tokenizer"),
        FilePath(),
        Unless("end_id"),
        Derived("none, where `end_id` is given"),
        Field(description="a tokenizer.json, or train(vocab)", examples=["tokenizer = train(4096)"]),
    ] = None
    validation: Annotated[
        float, Field(ge=0, lt=1, description="share of the documents that is held out", examples=["validation = 5%"])
    ] = 0.0
    chat: Annotated[
        Chat | None,
        Field(
            description="the text is conversations, in lines of .jsonl; without it, documents",
            examples=["chat { long = cut }"],
        ),
    ] = None
    documents: Annotated[
        Literal["joined", "masked"],
        Field(description="what a token sees of other documents in its sequence", examples=["documents = masked"]),
        Choices(
            {
                "joined": "all tokens before it, of whichever document",
                "masked": "its own document alone, in which positions count from 0; "
                "the first token of a document is not predicted",
            }
        ),
    ] = "joined"
    column: Annotated[
        str,
        Field(
            min_length=1,
            max_length=256,
            description="where the text of a row is: a key of lines of .jsonl, or a column of .parquet and .arrow",
            examples=['column = "content"'],
        ),
        Quiet(),
    ] = "text"

    fim: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="share of the training documents whose middle is moved to their end (fill-in-the-middle)",
            examples=["fim = 0.1"],
        ),
        Quiet(),
    ] = 0.0
    end_id: Annotated[
        int | None,
        Derived("that of the tokenizer"),
        Field(
            ge=0,
            le=16_777_215,
            description="id of the token that ends a document in files of token ids, where no tokenizer is named",
            examples=["end_id = 50256"],
        ),
        Quiet(),
    ] = None
    filters: Annotated[
        Filters | None,
        Field(
            description="which documents are left out; in a blend, of the sources that have no filters themselves",
            examples=["filters { shortest = 200, quality = gopher, duplicates = near }"],
        ),
        Quiet(),
    ] = None
    prompts: Annotated[
        Prompts | None,
        Quiet(),
        Field(
            description="rows are prompts of `train.grpo`; without it, documents or conversations",
            examples=["prompts { }", 'prompts { prompt = "question", answer = "solution" }'],
        ),
    ] = None

    @property
    def patterns(self) -> dict[str, str]:
        """What is read: files by the path of the key that names them."""
        if self.source is not None:
            return {"data.source": self.source}
        return {f"data.sources.{each.name}.files": each.files for each in self.sources}

    @property
    def pads_rows(self) -> bool:
        """Whether sequences end in padding: a row of a conversation, or a completion, is seldom as long as one."""
        return self.chat is not None or self.prompts is not None

    @property
    def masks_documents(self) -> bool:
        """Whether attention is told where documents begin."""
        return self.documents == "masked" or (self.chat is not None and self.chat.pack)

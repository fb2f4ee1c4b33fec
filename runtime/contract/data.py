"""Where the text of a run comes from, as plan.json has it, and what preparing it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from runtime.contract.recipe import Amount, Share, Vocab
from runtime.system.strict_json import NumberRange, Pattern, read

EXTRA_TOKENS = 2  # a sample is sequence + 2 tokens: the targets of the head and of MTP look one and two ahead
MAX_PERIOD = 100_000  # samples after which the order of sources repeats


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer that is trained on the data, with this many entries."""

    vocab: Vocab


@dataclass(frozen=True)
class ChatRecipe:
    """Conversations. `template`: a file of a chat template, or None for the one beside the tokenizer; `long`: what
    becomes of a row with more tokens than a sequence; `pack`: whether a sequence holds several rows."""

    template: Annotated[str, Pattern(".{1,4096}")] | None
    long: Literal["cut", "drop"]
    pack: bool = False


@dataclass(frozen=True)
class PromptsRecipe:
    """Prompts that completions are written to. `prompt` and `answer`: where they are in a row; None: the answer is
    where rows of other trainers have it."""

    prompt: Annotated[str, Pattern(".{1,256}")] = "prompt"
    answer: Annotated[str, Pattern(".{1,256}")] | None = None


@dataclass(frozen=True)
class FiltersRecipe:
    """Which documents of a source are left out. `shortest`, `longest`: characters; `similarity`: from which on two
    documents are near duplicates."""

    shortest: Amount | None = None
    longest: Amount | None = None
    quality: Literal["gopher"] | None = None
    duplicates: Literal["exact", "near"] | None = None
    similarity: Share = 0.8


@dataclass(frozen=True)
class BlendSource:
    """A source of a blend. `weight`: how many of the samples are of it, among as many as all weights sum to; `fim` and
    `filters`: those of this source."""

    name: Annotated[str, Pattern(r"[A-Za-z_]\w{0,254}")]
    files: Annotated[str, Pattern(".{1,4096}")]
    weight: Annotated[int, NumberRange(0, MAX_PERIOD)]
    fim: Share = 0.0
    filters: FiltersRecipe | None = None


@dataclass(frozen=True)
class DataRecipe:
    """Where the text comes from, relative to the folder of the spec; `tokenizer` is a file, or one to be trained.

    `source` is None where there are several `sources`. `chat`: lines of the text are conversations; `prompts`: rows are
    prompts; both None: they are documents. `documents`: whether a token sees in its sequence the documents before its
    own. `column`: where the text is in a row. `fim`: share of the training documents whose middle is moved to their
    end. `end_id`: the id that ends a document in files of token ids, where no tokenizer is named. `fim` and `filters`
    are of one source.
    """

    source: Annotated[str, Pattern(".{1,4096}")] | None
    tokenizer: Annotated[str, Pattern(".+")] | TrainedTokenizer | None
    validation: Share
    chat: ChatRecipe | None = None
    documents: Literal["joined", "masked"] = "joined"
    column: Annotated[str, Pattern(".{1,256}")] = "text"
    sources: tuple[BlendSource, ...] = ()
    fim: Share = 0.0
    end_id: Amount | None = None
    filters: FiltersRecipe | None = None
    prompts: PromptsRecipe | None = None

    @property
    def pads_rows(self) -> bool:
        """Whether sequences end in padding."""
        return self.chat is not None or self.prompts is not None

    @property
    def masks_documents(self) -> bool:
        """Whether segments are told where documents begin."""
        return self.documents == "masked" or (self.chat is not None and self.chat.pack)


@dataclass(frozen=True)
class DataRequest:
    """The parts of a plan by which the data is prepared, which are known before the plan is."""

    data: DataRecipe
    vocab: Vocab
    seed: Amount

    @staticmethod
    def from_json(text: str | bytes) -> DataRequest:
        """Raises FormError."""
        return read(DataRequest, text, "a request")

"""The data of a run in plan.json, and the request for preparing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from runtime.contract.recipe import Amount, Share, Vocab
from runtime.system.strict_json import NumberRange, Pattern, read

EXTRA_TOKENS = 2  # a sample has sequence + 2 tokens: targets of the head and of MTP are one and two tokens ahead
MAX_PERIOD = 100_000  # samples after which the order of sources repeats


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer that is trained on the data, with this many entries."""

    vocab: Vocab


@dataclass(frozen=True)
class ChatRecipe:
    """Conversations. `template`: the file of a chat template, or None for the one next to the tokenizer; `long`: how to
    handle a row with more tokens than a sequence; `pack`: whether a sequence holds several rows."""

    template: Annotated[str, Pattern(".{1,4096}")] | None
    long: Literal["cut", "drop"]
    pack: bool = False


@dataclass(frozen=True)
class PromptsRecipe:
    """Prompts for completions. `prompt`, `answer`: their columns in a row; None: the columns of other trainers are
    tried."""

    prompt: Annotated[str, Pattern(".{1,256}")] = "prompt"
    answer: Annotated[str, Pattern(".{1,256}")] | None = None


@dataclass(frozen=True)
class FiltersRecipe:
    """Filters that leave out documents of a source. `shortest`, `longest`: in characters; `similarity`: least
    similarity of near duplicates."""

    shortest: Amount | None = None
    longest: Amount | None = None
    quality: Literal["gopher"] | None = None
    duplicates: Literal["exact", "near"] | None = None
    similarity: Share = 0.8


@dataclass(frozen=True)
class BlendSource:
    """A source of a blend. `weight`: its number of samples, among as many samples as all weights sum to; `fim`,
    `filters`: of this source."""

    name: Annotated[str, Pattern(r"[A-Za-z_]\w{0,254}")]
    files: Annotated[str, Pattern(".{1,4096}")]
    weight: Annotated[int, NumberRange(0, MAX_PERIOD)]
    fim: Share = 0.0
    filters: FiltersRecipe | None = None


@dataclass(frozen=True)
class DataRecipe:
    """The text of a run, relative to the folder of the spec. `tokenizer` is a file, or one to be trained.

    `source` is None if there are several `sources`. `chat`: lines are conversations; `prompts`: rows are prompts; both
    None: they are documents. `documents`: whether a token sees earlier documents of its sequence ("joined") or not
    ("masked"). `column`: column of the text. `fim`: share of the training documents that are rearranged for
    fill-in-the-middle. `end_id`: the id that ends a document in token files without a tokenizer. `fim` and `filters`
    are for a single source.
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
        """Whether segments get the starts of documents."""
        return self.documents == "masked" or (self.chat is not None and self.chat.pack)


@dataclass(frozen=True)
class DataRequest:
    """The parts of a plan that determine the prepared data. They are known before the plan."""

    data: DataRecipe
    vocab: Vocab
    seed: Amount

    @staticmethod
    def from_json(text: str | bytes) -> DataRequest:
        """Parse a request. Raises FormError."""
        return read(DataRequest, text, "a request")

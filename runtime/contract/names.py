"""Names that say what they name: those of programs and of records. They are text in files and keys of mappings."""

from __future__ import annotations

from typing import Literal, cast, get_args

ProgramKind = Literal["train", "evaluate"]
# loss, mtp_loss: of the head and of multi-token prediction · sequence_loss, index_loss: of a layer · load: tokens of
# each expert of a layer · logits: the largest of each head of a block
RecordKind = Literal["loss", "mtp_loss", "sequence_loss", "index_loss", "load", "logits"]


class ProgramName(str):
    """What a program does, and with how many micro-batches: `train_8`, `evaluate_2`."""

    __slots__ = ()

    @classmethod
    def of(cls, kind: ProgramKind, micro_batches: int) -> ProgramName:
        return cls(f"{kind}_{micro_batches}")

    @classmethod
    def all_of(cls, micro_batches: int) -> tuple[ProgramName, ...]:
        """The names of every kind."""
        return tuple(cls.of(kind, micro_batches) for kind in get_args(ProgramKind))

    @property
    def kind(self) -> ProgramKind:
        return cast(ProgramKind, self.partition("_")[0])

    @property
    def trains(self) -> bool:
        return self.kind == "train"


class RecordName(str):
    """What a stage records of a step, and where: `loss`, `load layers.3`, `sequence_loss L3`."""

    __slots__ = ()

    @classmethod
    def of(cls, kind: RecordKind, place: str = "") -> RecordName:
        """`place`: of a layer its site, as in L3, or the prefix of its tensors, as in layers.3."""
        return cls(f"{kind} {place}" if place else kind)

    @property
    def kind(self) -> RecordKind:
        return cast(RecordKind, self.partition(" ")[0])

    @property
    def place(self) -> str:
        return self.partition(" ")[2]

    @property
    def is_largest(self) -> bool:
        """Whether a step has the largest of several; of all other records it has the sum."""
        return self.kind == "logits"

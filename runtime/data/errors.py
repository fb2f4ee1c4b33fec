"""What the user must mend about the data: one exception, its message names the file."""

from runtime.outcome import printable


class DataError(ValueError):
    """The corpus, the tokenizer or a shard cannot be used as given.

    Names of files and parts of their contents are in the message, so it is made safe for a terminal here.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))

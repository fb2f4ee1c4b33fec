"""What the user must mend about the data: one exception, its message names the file."""


class DataError(ValueError):
    """The corpus, the tokenizer or a shard cannot be used as given."""

"""Compiling a chat template in a process with limits: `python -P -m runtime.data.template_check DATA_BYTES`.

jinja2 computes constant expressions as it compiles, so `{{ 9 ** (9 ** 9) }}` alone would keep whoever compiles it busy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from runtime.data.errors import DataError
from runtime.limited import Answer, DeadError, FaultError, LateError, Limited, serve

DATA_BYTES = 1 << 30
COMPILE_S = 20.0  # a large template takes a tenth of a second, behind the start of a process


def marks_assistant(text: str, path: str | None) -> bool:
    """Whether a chat template marks what the assistant says. DataError, naming its file, where it is none."""
    with closing(Limited("runtime.data.template_check", DATA_BYTES)) as process:
        try:
            process.answer({"text": text, "path": path}, COMPILE_S)
            return bool(process.answer({}, COMPILE_S)["marks_assistant"])
        except LateError:
            raise DataError(f"{path}: not a chat template: it takes more than {COMPILE_S:g} s to be compiled") from None
        except DeadError as dead:
            raise DataError(f"{path}: not a chat template: {dead}") from None
        except FaultError as fault:
            raise DataError(str(fault)) from None


def _begin(what: Mapping[str, Any]) -> Answer:
    from runtime.data.chat_template import Template  # with jinja2, which whoever asks need not import

    try:
        template = Template(what["text"], {}, what["path"])
    except DataError as error:
        raise FaultError(str(error), "") from None
    return lambda _: {"marks_assistant": template.marks_assistant}


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), _begin))

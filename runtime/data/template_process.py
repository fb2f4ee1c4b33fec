"""A chat template in a process with limits: `python -P -m runtime.data.template_process DATA_BYTES`.

jinja2 evaluates constant expressions when it compiles, so `{{ 9 ** (9 ** 9) }}` would block the compiling process. The
time to render a template is unbounded, too.

The first question has the template. An empty question asks whether it marks what the assistant says. One with
`messages` asks for their text; if the template refuses them, the answer has the key `refused`, and the process
continues.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from runtime.data.files import DataError
from runtime.system.limited import Answer, DeadError, FaultError, LateError, LimitedProcess, serve

if TYPE_CHECKING:
    from runtime.data.chat import Settings  # imports numpy and tokenizers, which a template does not need

DATA_BYTES = 1 << 30
COMPILE_S = 20.0  # a large template takes a tenth of a second after the start of the process
RENDER_S = 20.0


class TemplateProcess:
    """A process that has compiled a chat template. Raises DataError that names the file if it is invalid."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.path
        self._process = LimitedProcess("runtime.data.template_process", DATA_BYTES)
        setup = {"text": settings.template, "path": settings.path, "tokens": dict(settings.tokens)}
        try:
            self._ask(setup, COMPILE_S, "not a chat template: ", "compiled")
        except DataError:
            self.close()
            raise

    def marks_assistant(self) -> bool:
        """Whether the template marks what the assistant says."""
        return bool(self._ask({}, COMPILE_S, "", "compiled")["marks_assistant"])

    def text(self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any], *, is_open: bool) -> str:
        """Return the text of a conversation and the header of the assistant's next turn; with `is_open` the text up to
        the end of the last message, for a completion that continues it.

        `names`: further variables of the template. Raises DataError if the template refuses the messages, or does not
        end.
        """
        question = {"messages": list(messages), "names": dict(names), "open": is_open}
        answer = self._ask(question, RENDER_S, "the chat template: ", "rendered")
        if "refused" in answer:
            raise DataError(answer["refused"])
        return str(answer["text"])

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, question: Mapping[str, Any], seconds: float, doing: str, done: str) -> dict[str, Any]:
        try:
            return self._process.answer(question, seconds)
        except LateError:
            raise DataError(f"{self._path}: {doing}it takes more than {seconds:g} s to be {done}") from None
        except DeadError as dead:
            raise DataError(f"{self._path}: {doing}{dead}") from None
        except FaultError as fault:
            raise DataError(str(fault)) from None


def marks_assistant(settings: Settings) -> bool:
    """Whether a chat template marks what the assistant says. DataError that names its file if it is invalid."""
    with closing(TemplateProcess(settings)) as process:
        return process.marks_assistant()


def _begin(setup: Mapping[str, Any]) -> Answer:
    from runtime.data.chat_template import Template  # imports jinja2, which the parent does not need

    try:
        template = Template(setup["text"], setup["tokens"], setup["path"])
    except DataError as error:
        raise FaultError(str(error), "") from None

    def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        if "messages" not in question:
            return {"marks_assistant": template.marks_assistant}
        messages, names = question["messages"], question["names"]
        try:
            is_open = question["open"]
            text = template.render_open(messages, names) if is_open else template.render(messages, names, prompt=True)
            return {"text": text}
        except DataError as error:
            return {"refused": str(error)}

    return answer


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], _begin))

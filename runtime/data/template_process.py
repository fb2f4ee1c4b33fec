"""A chat template in a process with limits: `python -P -m runtime.data.template_process DATA_BYTES`.

jinja2 computes constant expressions as it compiles, so `{{ 9 ** (9 ** 9) }}` alone would keep whoever compiles it busy.
What a template does as it renders has no bound either.

The first question has the template. An empty one asks whether it marks what the assistant says. One with `messages`
asks for their text; where the template refuses them the answer has the key `refused`, and the process goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from runtime.data.files import DataError
from runtime.system.limited import Answer, DeadError, FaultError, LateError, Limited, serve

if TYPE_CHECKING:
    from runtime.data.chat import Settings  # with numpy and tokenizers, which a template does not need

DATA_BYTES = 1 << 30
COMPILE_S = 20.0  # a large template takes a tenth of a second, behind the start of a process
RENDER_S = 20.0


class TemplateProcess:
    """A process that has compiled a chat template. Raises DataError, naming the file, where the text is none."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.path
        self._process = Limited("runtime.data.template_process", DATA_BYTES)
        what = {"text": settings.template, "path": settings.path, "tokens": dict(settings.tokens)}
        try:
            self._ask(what, COMPILE_S, "not a chat template: ", "compiled")
        except DataError:
            self.close()
            raise

    def marks_assistant(self) -> bool:
        """Whether the template marks what the assistant says."""
        return bool(self._ask({}, COMPILE_S, "", "compiled")["marks_assistant"])

    def text(self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any], *, is_open: bool) -> str:
        """The text of a conversation and the header of the assistant's next turn; with `is_open` the text up to the end
        of what the last message says, which is to be continued.

        `names`: what the template gets beside the messages. Raises DataError where the template refuses the messages,
        or does not come to an end.
        """
        question = {"messages": list(messages), "names": dict(names), "open": is_open}
        found = self._ask(question, RENDER_S, "the chat template: ", "rendered")
        if "refused" in found:
            raise DataError(found["refused"])
        return str(found["text"])

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
    """Whether a chat template marks what the assistant says. DataError, naming its file, where it is none."""
    with closing(TemplateProcess(settings)) as process:
        return process.marks_assistant()


def _begin(what: Mapping[str, Any]) -> Answer:
    from runtime.data.chat_template import Template  # with jinja2, which whoever asks need not import

    try:
        template = Template(what["text"], what["tokens"], what["path"])
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
    sys.exit(serve(int(sys.argv[1]), _begin))

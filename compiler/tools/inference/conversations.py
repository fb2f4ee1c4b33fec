"""Prompts for chat models: a conversation becomes the text that the chat template of the model writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import finalize

from compiler.tools.inference.sources import InferenceError
from runtime.contract import ChatRecipe, PromptsRecipe
from runtime.data.chat import NO_TEMPLATE, PUT_IT, Settings, messages_fault, more_fault, names_of, read_settings
from runtime.data.files import DataError
from runtime.data.template_process import TemplateProcess

Conversation = Mapping[str, Any]  # `messages`, and what else a row of a run's conversations has: `tools`


def conversation_of(text: str) -> Conversation:
    """The conversation that a text is: JSON of messages, or of an object with `messages`. Any other text is what a user
    says. InferenceError for messages that are none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and any(isinstance(each, dict) and "role" in each for each in found):
        found = {"messages": found}
    if not (isinstance(found, dict) and "messages" in found):
        return {"messages": [{"role": "user", "content": text}]}
    if fault := messages_fault("messages", found["messages"]) or more_fault(found):
        raise InferenceError(f"the prompt: {fault}")
    return found


class Conversations:
    """The chat template of a model, which a process with limits renders. The process starts with the first text."""

    def __init__(self, tokenizer: Path, template: Path | None = None) -> None:
        """`tokenizer`: a tokenizer.json. `template`: a file; None: what lies beside the tokenizer. InferenceError for a
        file that cannot be used."""
        self._folder = tokenizer.parent
        try:
            rows = PromptsRecipe() if template is None else ChatRecipe(str(template.absolute()), "cut")
            self._settings: Settings = read_settings(rows, tokenizer, self._folder)
        except DataError as error:
            raise InferenceError(str(error)) from None
        self._process: TemplateProcess | None = None

    @property
    def template(self) -> str | None:
        """The text of the template, None where there is none."""
        return self._settings.template

    @property
    def required(self) -> str:
        """The text of the template. InferenceError where there is none."""
        if self.template is None:
            raise InferenceError(f"{self._folder}: {NO_TEMPLATE}", PUT_IT)
        return self.template

    def text(self, conversation: Conversation, *, is_open: bool = False) -> str:
        """The text of a conversation and the header of the assistant's next turn; with `is_open` the text up to the end
        of what the last message says, which is to be continued.

        InferenceError if there is no template, or it refuses the messages.
        """
        _ = self.required
        messages = conversation["messages"]
        try:
            if self._process is None:
                self._process = TemplateProcess(self._settings)
                finalize(self, self._process.close)
            return self._process.text(messages, names_of(conversation), is_open=is_open)
        except DataError as error:
            raise InferenceError(str(error)) from None

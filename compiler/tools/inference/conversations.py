"""Prompts for chat models: renders conversations with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import finalize

from compiler.tools.inference.sources import InferenceError
from runtime.contract import ChatRecipe, PromptsRecipe
from runtime.data.chat import (
    NO_TEMPLATE,
    PUT_IT,
    Settings,
    messages_fault,
    names_of,
    read_settings,
    template_arguments_fault,
)
from runtime.data.files import DataError
from runtime.data.template_process import TemplateProcess

Conversation = Mapping[str, Any]  # `messages`, and optional keys of a data row such as `tools`


def conversation_of(text: str) -> Conversation:
    """Parse a conversation: a JSON list of messages or an object with `messages`. Any other text becomes one user
    message. Raises InferenceError for invalid messages."""
    try:
        conversation = json.loads(text)
    except (ValueError, RecursionError):
        conversation = None
    if isinstance(conversation, list) and any(
        isinstance(message, dict) and "role" in message for message in conversation
    ):
        conversation = {"messages": conversation}
    if not (isinstance(conversation, dict) and "messages" in conversation):
        return {"messages": [{"role": "user", "content": text}]}
    if fault := messages_fault("messages", conversation["messages"]) or template_arguments_fault(conversation):
        raise InferenceError(f"the prompt: {fault}")
    return conversation


class Conversations:
    """The chat template of a model, rendered in a process with resource limits that starts with the first text."""

    def __init__(self, tokenizer: Path, template: Path | None = None) -> None:
        """`tokenizer`: a tokenizer.json. `template`: a template file; None: the one next to the tokenizer. Raises
        InferenceError if a file cannot be used."""
        self._folder = tokenizer.parent
        try:
            rows = PromptsRecipe() if template is None else ChatRecipe(str(template.absolute()), "cut")
            self._settings: Settings = read_settings(rows, tokenizer, self._folder)
        except DataError as error:
            raise InferenceError(str(error)) from None
        self._process: TemplateProcess | None = None

    @property
    def template(self) -> str | None:
        """The text of the template; None if there is none."""
        return self._settings.template

    @property
    def required_template(self) -> str:
        """The text of the template. Raises InferenceError if there is none."""
        if self.template is None:
            raise InferenceError(f"{self._folder}: {NO_TEMPLATE}", PUT_IT)
        return self.template

    def text(self, conversation: Conversation, *, is_open: bool = False) -> str:
        """Render a conversation and the header of the assistant's next turn; with `is_open`, only up to the end of the
        last message's content, so that it can be continued.

        Raises InferenceError if there is no template, or it rejects the messages.
        """
        _ = self.required_template
        messages = conversation["messages"]
        try:
            if self._process is None:
                self._process = TemplateProcess(self._settings)
                finalize(self, self._process.close)
            return self._process.text(messages, names_of(conversation), is_open=is_open)
        except DataError as error:
            raise InferenceError(str(error)) from None

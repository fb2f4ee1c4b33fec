"""Chat templates: jinja2 in its sandbox, with the names and filters that `transformers` gives them.

`{% generation %} … {% endgeneration %}` marks what the assistant says. To find the marked text, a conversation is
rendered twice, the second time with an unused character around it. This also works if a template captures its output
(in a macro, a `set` block or a filter) and writes it later. A template is untrusted: it is rendered in a process with
limits (runtime/data/given.py), and never becomes code of this program. Source of the names:
`_cached_compile_jinja_template` of transformers 5, utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from runtime.data.files import DataError

MAX_RENDERED = 64 << 20  # characters of a row
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message; templates read the first
NONCHARACTERS = range(0xFDD0, 0xFDF0)
Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]  # [first, end) of characters, ascending


class Template:
    """A compiled chat template. `tokens`: special tokens by name, such as `eos_token`. `path`: its file.

    Raises DataError that names the file if the text is no template.
    """

    def __init__(self, text: str, tokens: Mapping[str, str], path: str | None) -> None:
        self._environment = _environment()
        self._tokens = dict(tokens)
        try:
            parsed = self._environment.parse(text)
            self._template = self._environment.from_string(parsed)
        except (jinja2.TemplateError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise DataError(f"{path}: not a chat template{line}: {error}") from None
        self.marks_assistant = any(call.name == "mark_generation" for call in _extension_calls(parsed))

    def render(self, messages: Messages, names: Mapping[str, Any], *, prompt: bool) -> str:
        """Return the text of a conversation. `prompt`: end with the header of the assistant's next turn. `names`:
        further variables of the template.

        Raises DataError if the template refuses the messages, or writes too much.
        """
        return self._render(messages, {"add_generation_prompt": prompt, **_clock(), **names})

    def render_marked(self, messages: Messages, names: Mapping[str, Any]) -> tuple[str, Spans]:
        """Return the text of a conversation, and the spans of it that the template marks as the assistant's.

        Raises DataError as `render` does, and if the template changes its output after marking it, so that the
        marked text cannot be found.
        """
        variables = {"add_generation_prompt": False, **_clock(), **names}
        text = self._render(messages, variables)
        if not self.marks_assistant:
            return text, []
        self._environment.marks = mark = unused_character(text)  # type: ignore[attr-defined]  # read by `_GenerationTag`
        try:
            marked = self._render(messages, variables)
        finally:
            self._environment.marks = ""  # type: ignore[attr-defined]
        unmarked, spans = _spans(marked, mark)
        if unmarked != text:
            raise DataError(
                "the chat template changes the text between its `generation` tags: apply filters inside of them"
            )
        return text, spans

    def render_open(self, messages: Messages, names: Mapping[str, Any]) -> str:
        """Return the text of a conversation up to the end of its last message's text, which a completion continues.

        Raises DataError as `render` does, and if the last message has no text or the template omits its text.
        """
        mark = unused_character(self.render(messages, names, prompt=False))
        *before, last = messages
        rendered = self.render([*before, _append_text(last, mark + " ")], names, prompt=False)
        text, is_found, after = rendered.rpartition(mark)
        if not is_found:
            raise DataError("the chat template omits the text of the last message, so it cannot be continued")
        return text if after.startswith(" ") else text.rstrip()  # this template trims the text of a message

    def _render(self, messages: Messages, names: Mapping[str, Any]) -> str:
        blocks: list[str] = []
        size = 0
        variables = {**self._tokens, "tools": None, "documents": None, **names, "messages": [*map(_message, messages)]}
        try:
            for block in self._template.generate(variables):
                blocks.append(block)
                size += len(block)
                if size > MAX_RENDERED:
                    raise DataError(f"the chat template writes more than {MAX_RENDERED >> 20}M characters")
        except DataError:
            raise
        except Exception as error:  # a template may raise anything: TypeError, KeyError and others
            raise DataError(f"the chat template fails: {str(error) or type(error).__name__}") from None
        return "".join(blocks)


def unused_character(text: str) -> str:
    """Return a character that is not in a text, from those that Unicode reserves for internal use.

    Raises DataError if the text has all of them.
    """
    for code in NONCHARACTERS:
        if chr(code) not in text:
            return chr(code)
    raise DataError("the conversation has every noncharacter from U+FDD0 to U+FDEF")


def _clock() -> dict[str, Any]:
    """Return the clock of templates, with the same time throughout one rendering."""
    return {"strftime_now": datetime.now().strftime}


def _spans(marked: str, mark: str) -> tuple[str, Spans]:
    """Return a text without its marks, and the spans between each first and second mark."""
    parts = marked.split(mark)
    ends = list(accumulate(map(len, parts)))
    return "".join(parts), list(zip(ends[::2], ends[1::2], strict=False))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise a message for templates: no value is null, and the reasoning has the keys that they read."""
    cleaned = {name: value for name, value in message.items() if value is not None}
    reasoning = next((cleaned[name] for name in REASONING if name in cleaned), None)
    return cleaned if reasoning is None else {"thinking": reasoning, **cleaned, "reasoning_content": reasoning}


def replace_text_of(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a message of the same role with this text, without reasoning and tool calls."""
    fields = {name: value for name, value in message.items() if name not in (*REASONING, "tool_calls")}
    is_parts = isinstance(fields.get("content"), list)
    return fields | {"content": [{"type": "text", "text": text}] if is_parts else text}


def _append_text(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a message with `text` appended to its own. Raises DataError if it has no text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + text}
    parts = list(content) if isinstance(content, list) else []
    for place in reversed(range(len(parts))):
        if isinstance(parts[place], Mapping) and isinstance(parts[place].get("text"), str):
            parts[place] = {**parts[place], "text": parts[place]["text"] + text}
            return {**message, "content": parts}
    raise DataError("the last message has no text to continue")


# ---------------------------------------------------------------- what templates may use


class _GenerationTag(Extension):
    """The `generation` tag: it puts `environment.marks` around its body, where there is one."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark_generation"), [], [], body).set_lineno(line)

    def mark_generation(self, caller: Any) -> str:
        mark: str = getattr(self.environment, "marks", "")
        return f"{mark}{str(caller()).replace(mark, '')}{mark}" if mark else caller()


class _Dict:
    """`dict` in a template: it makes dictionaries, and has no attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **names: Any) -> dict[Any, Any]:
        return dict(*args, **names)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` in a template, without names that begin with an underscore."""

    def __init__(*args: Any, **names: Any) -> None:
        self, *positional = args
        attributes = dict(*positional, **names)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with _: {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, dict=_Dict())
    environment.globals["namespace"] = _TemplateNamespace
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _extension_calls(parsed: nodes.Template) -> list[nodes.ExtensionAttribute]:
    """Return the extension methods that the tags of a template call."""
    calls = [block.call.node for block in parsed.find_all(nodes.CallBlock)]
    return [call for call in calls if isinstance(call, nodes.ExtensionAttribute)]

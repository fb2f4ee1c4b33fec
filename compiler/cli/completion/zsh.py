"""The script for zsh, with an `_arguments` call for each command."""

from __future__ import annotations

from collections.abc import Iterator

from compiler.cli.completion.command_words import Argument, Command, CommandLine

HEAD = """\
#compdef dsc
# Completion of dsc for zsh, printed by `dsc completion zsh`. To use it now, after compinit, or in every shell:
#   source <(dsc completion zsh)
#   dsc completion zsh > ~/.zfunc/_dsc        with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc

_dsc_specs() { _files -g "*.dsc(-.)" }

_dsc_overrides() {
    if compset -P "*="; then
        case ${IPREFIX%%=*} in
"""
TAIL = """\

if [[ $funcstack[1] == _dsc ]]; then
    _dsc "$@"
else
    compdef _dsc dsc
fi
"""


def script(line: CommandLine) -> str:
    """The completion script."""
    return "\n".join(_lines(line)) + "\n" + TAIL


def _lines(line: CommandLine) -> Iterator[str]:
    yield HEAD.rstrip("\n")
    for key, words in line.keys.items():
        if words:
            yield f"            {key}) compadd -- {' '.join(words)} ;;"
    yield "        esac"
    yield "    else"
    yield f"        compadd -S = -- {' '.join(line.keys)}"
    yield "    fi"
    yield "}"
    yield ""
    yield f"_dsc_topics() {{ compadd -- {' '.join((*line.codes, *line.keys))} }}"
    yield ""
    yield f"_dsc_shown() {{ compadd -- {' '.join(line.keys)} }}"
    yield ""
    yield "_dsc() {"
    yield "    local -a commands"
    yield "    commands=("
    for command in line.commands:
        yield f"        '{command.name}:{_quote(command.help)}'"
    yield "    )"
    yield "    if ((CURRENT == 2)); then"
    yield "        _describe command commands"
    yield "        return"
    yield "    fi"
    yield "    shift words"
    yield "    ((CURRENT--))"
    yield "    case $words[1] in"
    for command in line.commands:
        yield f"        {command.name})"
        yield "            _arguments \\"
        specs = [*(_option(option) for option in command.options), *_positionals(command)]
        yield " \\\n".join(f"                {spec}" for spec in specs)
        yield "            ;;"
    yield "    esac"
    yield "}"


def _option(option: Argument) -> str:
    """`'(-s --set)*'{-s,--set}'[override a key]:value:_dsc_overrides'`."""
    value = f":value:{_values(option)}" if option.takes_value else ""
    repeat = "*" if option.kind == "overrides" else ""
    text = f"[{option.help}]{value}"
    if len(option.flags) == 1:
        return f"'{repeat}{option.flags[0]}{text}'"
    exclusions = "" if repeat else f"({' '.join(option.flags)})"
    return f"'{exclusions}{repeat}'{{{','.join(option.flags)}}}'{text}'"


def _positionals(command: Command) -> Iterator[str]:
    *first, last = command.positionals or (None,)
    if last is None:
        return
    for index, argument in enumerate(first, 1):
        yield f"'{index}:{argument.help or 'value'}:{_values(argument)}'"
    values = "_dsc_shown" if command.name == "show" else _values(last)
    yield f"'*:{last.help or 'value'}:{values}'"


def _values(argument: Argument) -> str:
    """The action that completes a value."""
    if argument.kind == "words":
        return f"({' '.join(argument.words)})"
    table = {"": " ", "specs": "_dsc_specs", "files": "_files", "overrides": "_dsc_overrides", "topics": "_dsc_topics"}
    return table[argument.kind]


def _quote(text: str) -> str:
    return text.replace("'", "'\\''").replace(":", "\\:")

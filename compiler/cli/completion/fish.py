"""The script for fish, with a `complete` command for each option."""

from __future__ import annotations

from collections.abc import Iterator

from compiler.cli.completion.command_words import Argument, Command, CommandLine

HEAD = """\
# Completion of dsc for fish, printed by `dsc completion fish`. To use it now and in every shell:
#   dsc completion fish | source
#   dsc completion fish > ~/.config/fish/completions/dsc.fish

function __dsc_specs
    __fish_complete_suffix .dsc
end

function __dsc_overrides
    set -l token (commandline -ct)
    switch "$token"
"""


def script(line: CommandLine) -> str:
    """The completion script."""
    return "\n".join(_lines(line)) + "\n"


def _lines(line: CommandLine) -> Iterator[str]:
    yield HEAD.rstrip("\n")
    for key, words in line.keys.items():
        if words:
            yield f"        case '{key}=*'"
            yield f"            printf '%s\\n' {' '.join(f'{key}={word}' for word in words)}"
    yield "        case '*'"
    yield f"            printf '%s=\\n' {' '.join(line.keys)}"
    yield "    end"
    yield "end"
    yield ""
    yield "function __dsc_topics"
    yield f"    printf '%s\\n' {' '.join((*line.codes, *line.keys))}"
    yield "end"
    yield ""
    yield "complete -c dsc -f"
    names = " ".join(command.name for command in line.commands)
    outside = f"not __fish_seen_subcommand_from {names}"
    for command in line.commands:
        yield f"complete -c dsc -n '{outside}' -a {command.name} -d '{_quote(command.help)}'"
    yield f"complete -c dsc -n '{outside}' -l version -d 'print the version'"
    for command in line.commands:
        yield from _command(command)


def _command(command: Command) -> Iterator[str]:
    inside = f"complete -c dsc -n '__fish_seen_subcommand_from {command.name}'"
    for option in command.options:
        flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
        value = f" {_values(option)}" if option.takes_value else ""
        yield f"{inside} {flags}{value} -d '{option.help}'"
    values = (_values(argument) for argument in command.positionals if argument.kind)
    for text in dict.fromkeys(values):
        yield f"{inside} {text.removeprefix('-x ').removeprefix('-r ')}"


def _values(argument: Argument) -> str:
    """The arguments of `complete` for the value of an option."""
    if argument.kind == "words":
        return f"-x -a '{' '.join(argument.words)}'"
    return {
        "": "-x",
        "specs": "-x -k -a '(__dsc_specs)'",
        "files": "-r -F",
        "overrides": "-x -a '(__dsc_overrides)'",
        "topics": "-x -a '(__dsc_topics)'",
    }[argument.kind]


def _quote(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")

"""The script for bash 4 and newer. bash splits words at `=`: `--format=json` is three words."""

from __future__ import annotations

from collections.abc import Iterator

from compiler.cli.completion.command_words import Argument, Command, CommandLine

HEAD = """\
# Completion of dsc for bash, printed by `dsc completion bash`. To use it now and in every shell:
#   source <(dsc completion bash)
#   dsc completion bash > ~/.local/share/bash-completion/completions/dsc

_dsc_reply() { mapfile -t COMPREPLY < <(compgen "$@" -- "$cur"); }

_dsc_specs() {
    compopt -o filenames 2> /dev/null
    mapfile -t COMPREPLY < <(compgen -d -- "$cur"; compgen -f -X '!*.dsc' -- "$cur")
}

_dsc_files() {
    compopt -o filenames 2> /dev/null
    _dsc_reply -f
}

_dsc_overrides() {
    compopt -o nospace 2> /dev/null
    _dsc_reply -S = -W "$_dsc_keys"
}

_dsc() {
    local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}" command="${COMP_WORDS[1]}" option=""
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        _dsc_reply -W "$_dsc_commands --help --version"
        return
    fi
    if [[ $cur == "=" ]]; then
        option="$before" cur=""
    elif [[ $before == "=" ]]; then
        option="${COMP_WORDS[COMP_CWORD - 2]}"
    elif [[ $before == -* ]]; then
        option="$before"
    fi
"""


def script(line: CommandLine) -> str:
    """The completion script."""
    return "\n".join(_lines(line)) + "\n"


def _lines(line: CommandLine) -> Iterator[str]:
    yield HEAD.rstrip("\n")
    yield '    case "$option" in'
    for key, words in line.keys.items():
        if words:
            yield f'        {key}) _dsc_reply -W "{" ".join(words)}" && return ;;'
    yield "    esac"
    yield '    case "$command $option" in'
    for command in line.commands:
        for option in command.options:
            if option.takes_value:
                pattern = " | ".join(f'"{command.name} {flag}"' for flag in option.flags)
                yield f"        {pattern}) {_values(option)}; return ;;"
    yield "    esac"
    yield '    case "$command $cur" in'
    for command in line.commands:
        flags = " ".join(flag for option in command.options for flag in option.flags)
        yield f'        "{command.name} -"*) _dsc_reply -W "{flags}" ;;'
    for command in line.commands:
        values = _positional(command)
        if values:
            yield f'        "{command.name} "*) {values} ;;'
    yield "    esac"
    yield "}"
    yield ""
    yield f'_dsc_commands="{" ".join(command.name for command in line.commands)}"'
    yield f'_dsc_keys="{" ".join(line.keys)}"'
    yield f'_dsc_topics="{" ".join((*line.codes, *line.keys))}"'
    yield "complete -F _dsc dsc"


def _positional(command: Command) -> str:
    """The shell code that completes the positional arguments of a command."""
    kinds = [argument for argument in command.positionals if argument.kind]
    if {"specs", "topics"} <= {argument.kind for argument in kinds}:
        return (
            'if [[ $cur == */* || -z $cur || $COMP_CWORD -eq 2 ]]; then _dsc_specs; else _dsc_reply -W "$_dsc_keys"; fi'
        )
    words = [word for argument in kinds if argument.kind == "words" for word in argument.words]
    files = next((argument for argument in kinds if argument.kind in ("files", "specs")), None)
    if words and files:
        return f'if ((COMP_CWORD == 2)); then _dsc_reply -W "{" ".join(words)}"; else {_values(files)}; fi'
    return _values(kinds[0]) if kinds else ""


def _values(argument: Argument) -> str:
    """The shell code that completes the value of an option."""
    if argument.kind == "words":
        return f'_dsc_reply -W "{" ".join(argument.words)}"'
    return {
        "": ":",
        "specs": "_dsc_specs",
        "files": "_dsc_files",
        "overrides": "_dsc_overrides",
        "topics": '_dsc_reply -W "$_dsc_topics"',
    }[argument.kind]

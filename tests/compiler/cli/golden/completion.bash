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
    case "$option" in
        c.d) _dsc_reply -W "x y" && return ;;
    esac
    case "$command $option" in
        "check -s" | "check --set") _dsc_overrides; return ;;
        "check --format") _dsc_reply -W "text json"; return ;;
        "check -o" | "check --out") _dsc_files; return ;;
        "check --name") :; return ;;
    esac
    case "$command $cur" in
        "check -"*) _dsc_reply -W "-h --help -s --set --format -o --out --name" ;;
        "show -"*) _dsc_reply -W "-h --help" ;;
        "import -"*) _dsc_reply -W "" ;;
        "check "*) _dsc_specs ;;
        "show "*) if [[ $cur == */* || -z $cur || $COMP_CWORD -eq 2 ]]; then _dsc_specs; else _dsc_reply -W "$_dsc_keys"; fi ;;
        "import "*) if ((COMP_CWORD == 2)); then _dsc_reply -W "hf"; else _dsc_files; fi ;;
    esac
}

_dsc_commands="check show import"
_dsc_keys="a.b c.d"
_dsc_topics="E0101 a.b c.d"
complete -F _dsc dsc

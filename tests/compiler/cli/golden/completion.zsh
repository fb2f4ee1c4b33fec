#compdef dsc
# Completion of dsc for zsh, printed by `dsc completion zsh`. To use it now, after compinit, or in every shell:
#   source <(dsc completion zsh)
#   dsc completion zsh > ~/.zfunc/_dsc        with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc

_dsc_specs() { _files -g "*.dsc(-.)" }

_dsc_overrides() {
    if compset -P "*="; then
        case ${IPREFIX%%=*} in
            c.d) compadd -- x y ;;
        esac
    else
        compadd -S = -- a.b c.d
    fi
}

_dsc_topics() { compadd -- E0101 a.b c.d }

_dsc_shown() { compadd -- a.b c.d }

_dsc() {
    local -a commands
    commands=(
        'check:check a spec\: it'\''s quick'
        'show:print values'
        'import:from elsewhere'
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    shift words
    ((CURRENT--))
    case $words[1] in
        check)
            _arguments \
                '(-h --help)'{-h,--help}'[show this help message and exit]' \
                '*'{-s,--set}'[override a key]:value:_dsc_overrides' \
                '--format[the format]:value:(text json)' \
                '(-o --out)'{-o,--out}'[where to]:value:_files' \
                '--name[a name]:value: ' \
                '*:spec files:_dsc_specs'
            ;;
        show)
            _arguments \
                '(-h --help)'{-h,--help}'[show this help message and exit]' \
                '1:a spec:_dsc_specs' \
                '*:values:_dsc_shown'
            ;;
        import)
            _arguments \
                '1:of what:(hf)' \
                '*:the file:_files'
            ;;
    esac
}

if [[ $funcstack[1] == _dsc ]]; then
    _dsc "$@"
else
    compdef _dsc dsc
fi

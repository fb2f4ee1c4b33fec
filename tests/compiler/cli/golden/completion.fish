# Completion of dsc for fish, printed by `dsc completion fish`. To use it now and in every shell:
#   dsc completion fish | source
#   dsc completion fish > ~/.config/fish/completions/dsc.fish

function __dsc_specs
    __fish_complete_suffix .dsc
end

function __dsc_overrides
    set -l token (commandline -ct)
    switch "$token"
        case 'c.d=*'
            printf '%s\n' c.d=x c.d=y
        case '*'
            printf '%s=\n' a.b c.d
    end
end

function __dsc_topics
    printf '%s\n' E0101 a.b c.d
end

complete -c dsc -f
complete -c dsc -n 'not __fish_seen_subcommand_from check show import' -a check -d 'check a spec: it\'s quick'
complete -c dsc -n 'not __fish_seen_subcommand_from check show import' -a show -d 'print values'
complete -c dsc -n 'not __fish_seen_subcommand_from check show import' -a import -d 'from elsewhere'
complete -c dsc -n 'not __fish_seen_subcommand_from check show import' -l version -d 'print the version'
complete -c dsc -n '__fish_seen_subcommand_from check' -s h -l help -d 'show this help message and exit'
complete -c dsc -n '__fish_seen_subcommand_from check' -s s -l set -x -a '(__dsc_overrides)' -d 'override a key'
complete -c dsc -n '__fish_seen_subcommand_from check' -l format -x -a 'text json' -d 'the format'
complete -c dsc -n '__fish_seen_subcommand_from check' -s o -l out -r -F -d 'where to'
complete -c dsc -n '__fish_seen_subcommand_from check' -l name -x -d 'a name'
complete -c dsc -n '__fish_seen_subcommand_from check' -k -a '(__dsc_specs)'
complete -c dsc -n '__fish_seen_subcommand_from show' -s h -l help -d 'show this help message and exit'
complete -c dsc -n '__fish_seen_subcommand_from show' -k -a '(__dsc_specs)'
complete -c dsc -n '__fish_seen_subcommand_from show' -a '(__dsc_topics)'
complete -c dsc -n '__fish_seen_subcommand_from import' -a 'hf'
complete -c dsc -n '__fish_seen_subcommand_from import' -F

#compdef cairn
# completion of cairn in zsh: in a folder of $fpath, or `cairn completion zsh --install`
_cairn() {
    local row; local -a values shown keys shown_keys
    for row in "${(@f)$(${~words[1]} --complete "${(j: :)${(@q)words[1,CURRENT-1]}} $PREFIX" 2>/dev/null)}"; do
        case "${row%%$'\t'*}" in
            *:files) [[ $PREFIX == -*=* ]] && compset -P '*='; _files ;;
            *=) keys+=("${row%%$'\t'*}"); shown_keys+=("${row/$'\t'/  -- }") ;;
            ?*) values+=("${row%%$'\t'*}"); shown+=("${row/$'\t'/  -- }") ;;
        esac
    done
    (( $#keys )) && compadd -l -S '' -d shown_keys -a keys
    (( $#values )) && compadd -l -d shown -a values
}
if [[ $funcstack[1] == _cairn || $funcstack[1] == _cyclopts_cairn ]]; then _cairn "$@"; else compdef _cairn cairn; fi

"""The scripts that let bash, zsh and fish ask `cairn` what Tab can add, and where the shells look for them."""

from pathlib import Path
from typing import Literal

Shell = Literal["bash", "zsh", "fish"]

# Bash replaces only what stands behind the last of COMP_WORDBREAKS, to which = and @ belong; @ itself is replaced too.
_BASH = r"""# completion of cairn in bash: source this file, or `cairn completion bash --install`
_cairn() {
    local line="${COMP_LINE:0:COMP_POINT}" word cut value meaning
    word="${line##*[[:space:]]}"
    cut="${word%"${word##*[$COMP_WORDBREAKS]}"}"
    cut="${cut%@}"
    COMPREPLY=()
    while IFS=$'\t' read -r value meaning; do
        if [[ $value == *:files ]]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r value; do COMPREPLY+=("$value"); done < <(compgen -f -- "${word#"$cut"}")
        else
            [[ $value == *= ]] && compopt -o nospace 2>/dev/null
            COMPREPLY+=("${value#"$cut"}")
        fi
    done < <("${COMP_WORDS[0]/#\~/$HOME}" --complete "$line" 2>/dev/null)
}
complete -F _cairn cairn
"""

_ZSH = r"""#compdef cairn
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
"""

_FISH = r"""# completion of cairn in fish: `cairn completion fish --install`
function __cairn_complete
    for row in (cairn --complete (commandline --cut-at-cursor --current-process | string collect) 2>/dev/null)
        if string match -q '*:files' -- $row
            __fish_complete_path (commandline --cut-at-cursor --current-token)
        else
            echo $row
        end
    end
end
complete --command cairn --no-files --arguments '(__cairn_complete)'
"""
SCRIPTS: dict[Shell, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def install_script(shell: Shell) -> Path:
    """Put the script where the shell looks, and a line into its start-up file; returns where; raises OSError."""
    from cyclopts.completion.install import add_to_rc_file, get_default_completion_path

    path = get_default_completion_path(shell, "cairn").absolute()
    path.write_text(SCRIPTS[shell], encoding="utf-8")
    if shell != "fish":
        add_to_rc_file(path, "cairn", shell)
    return path

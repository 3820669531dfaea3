# completion of cairn in bash: source this file, or `cairn completion bash --install`
# Bash replaces only what stands behind the last of COMP_WORDBREAKS, to which = and @ belong; @ itself is replaced too.
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

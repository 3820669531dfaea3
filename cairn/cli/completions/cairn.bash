# Bash splits a word at @ and puts what is offered in the place of the @ and what stands behind it.
_cairn_references() {
    local word="${COMP_LINE:0:COMP_POINT}" run=""
    word="${word##*[[:space:]\"\']}"
    if [[ $word == *@* ]]; then
        run="${word%%@*}"
        while (( COMP_CWORD > 1 )) && [[ ${COMP_WORDS[COMP_CWORD]} != "$run" ]]; do COMP_CWORD=$((COMP_CWORD - 1)); done
        COMP_WORDS[COMP_CWORD]="$word"
    fi
    _cairn
    COMPREPLY=("${COMPREPLY[@]#"$run"}")
    [[ ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2>/dev/null
}
complete -o default -F _cairn_references cairn

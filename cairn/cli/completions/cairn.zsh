# A file of $fpath defines the function when it is first called; a sourced one registers it.
if [[ $funcstack[1] == _cyclopts_cairn ]]; then _cyclopts_cairn "$@"; else compdef _cyclopts_cairn cairn; fi

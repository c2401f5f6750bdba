# Read by scripts that pass settings on. Two values for one setting are an error on a command line, so of the words of a
# script and of its user the last one of each key is passed on.

# last_of_each WORD...: set the array `merged` to the words, without a KEY=VALUE whose key a later word sets.
last_of_each() {
    local all=("$@") names=() i j
    merged=()
    for ((i = 0; i < ${#all[@]}; i++)); do
        names[i]=${all[i]%%=*}
        names[i]=${names[i]##*+} # +KEY and ++KEY are KEY
        [[ "${all[i]}" == *=* ]] || names[i]=""
    done
    for ((i = 0; i < ${#all[@]}; i++)); do
        for ((j = i + 1; j < ${#all[@]}; j++)); do
            [ -z "${names[i]}" ] || [ "${names[j]}" != "${names[i]}" ] || continue 2
        done
        merged+=("${all[i]}")
    done
}

#!/usr/bin/env bash
# A document's console blocks do what they show: console_blocks.sh DOCUMENT SPOLIA ROOT. In a block, "$ " begins a command,
# a here-document goes on to its END, and what follows is what the command prints; a line "..." stands for any lines. The
# commands run in a folder of their own, where ROOT's tests and mappings lie.
set -uo pipefail
export LC_ALL=C.UTF-8
document=$(realpath "$1") spolia=$(realpath "$2") root=$(realpath "$3")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export TMPDIR=$work
ln -s "$root/tests" "$root/mappings" .
PATH=$(dirname "$spolia"):$PATH

commands=0 faults=0 command="" expected="" line_of_command=0 number=0 in_block=no in_text=no

# Whether the text is the pattern, whose lines "..." are any lines.
is_like() {
  local text=$1 pattern=$2 part rest
  while [[ $'\n'$pattern == *$'\n...\n'* ]]; do
    rest=$'\n'$pattern
    part=${rest%%$'\n...\n'*}$'\n'
    pattern=${rest#*$'\n...\n'}
    part=${part#$'\n'}
    if [[ -n ${started:-} ]]; then
      [[ $text == *"$part"* ]] || return 1
    else
      [[ $text == "$part"* ]] || return 1
    fi
    text=${text#*"$part"}
    local started=yes
  done
  if [[ -n ${started:-} ]]; then
    [[ $text == *"$pattern" ]]
  else
    [[ $text == "$pattern" ]]
  fi
}

run() {
  [[ -n $command ]] || return 0
  local printed
  eval "$command" >printed 2>&1 </dev/null
  printed=$(<printed)
  [[ -z $printed ]] || printed+=$'\n'
  ((++commands))
  if ! is_like "$printed" "$expected"; then
    printf '%s, line %d:\n$ %s\n' "$document" "$line_of_command" "$command"
    diff <(printf '%s' "$expected") <(printf '%s' "$printed")
    ((++faults))
  fi
  command="" expected=""
}

while IFS= read -r line; do
  ((++number))
  if [[ $in_block == no ]]; then
    [[ $line == '```console' ]] && in_block=yes
  elif [[ $in_text == yes ]]; then
    command+=$'\n'$line
    [[ $line == END ]] && in_text=no
  elif [[ $line == '```' ]]; then
    run
    in_block=no
  elif [[ $line == '$ '* ]]; then
    run
    command=${line#'$ '} line_of_command=$number
    [[ $command == *"<<'END'"* ]] && in_text=yes
  else
    expected+=$line$'\n'
  fi
done <"$document"
echo "$commands commands, $faults of them print something else"
((commands > 0 && faults == 0))

#!/usr/bin/env bash
# usage: mpi_save_killed.sh MPIEXEC PROGRAM: a rank is killed during a save; the job ends, nothing half is published, the
# checkpoint before it loads, and the next save clears what was left.
set -uo pipefail
mpiexec=$1
program=$2
failed=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for operation in 0 2 5 8 11 14; do
  folder=$work/$operation
  output=$(timeout 60 "$mpiexec" -n 3 "$program" killed "$folder" "$operation" 2>&1)
  result=$?
  if ((result == 0 || result == 124)); then
    printf 'FAILED: killed at operation %s, the job ended with %s:\n%s\n' "$operation" "$result" "$output"
    failed=1
  elif ! output=$("$program" check "$folder" 1 2>&1); then
    printf 'FAILED: killed at operation %s, then %s\n' "$operation" "$output"
    failed=1
  else
    printf 'ok: killed at operation %s\n' "$operation"
  fi
done
exit $failed

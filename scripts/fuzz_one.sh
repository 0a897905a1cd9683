#!/usr/bin/env bash
# Runs one libFuzzer target: scripts/fuzz_one.sh SECONDS TARGET
# Seeds come from fuzz/corpus/NAME; what it finds is kept in build/fuzz/found/NAME, crashers beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=$1
target=$2
name=${target##*/}
name=${name%_fuzz}
found=build/fuzz/found/$name
log=$found.log
mkdir -p "$found"
corpora=("$found")
export ASAN_SYMBOLIZER_PATH=/usr/bin/llvm-symbolizer-16
[[ -d fuzz/corpus/$name ]] && corpora+=("fuzz/corpus/$name")

if "$target" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=10 -artifact_prefix="$found-" \
  "${corpora[@]}" >"$log" 2>&1; then
  printf '%s: fine, %s\n' "$name" "$(tail -n 1 "$log")"
else
  printf '%s: failed, see %s; its end:\n' "$name" "$log"
  tail -n 40 "$log"
  exit 1
fi

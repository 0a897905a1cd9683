#!/usr/bin/env bash
# Runs one libFuzzer target: scripts/fuzz_one.sh SECONDS TARGET
# Its seeds are made from tests/data; what it finds is kept in build/fuzz/found/NAME, crashers beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=$1
target=$2
name=${target##*/}
name=${name%_fuzz}
seeds=build/fuzz/corpus/$name
found=build/fuzz/found/$name
log=$found.log
export ASAN_SYMBOLIZER_PATH=/usr/bin/llvm-symbolizer-16

options=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=256 -artifact_prefix="$found-")
case $name in
  safetensors | weight_index | sharding_info | spolia_manifest) options+=(-dict=fuzz/json.dict) ;;
  pickle | tensor_pickle | dcp_metadata) options+=(-dict=fuzz/pickle.dict) ;;
  zip | torch_save | dcp_item) options+=(-dict=fuzz/zip.dict) ;;
  mapping) options+=(-dict=fuzz/mapping.dict) ;;
esac

mkdir -p "$found"
fuzz/make_corpus.sh "$name" "$seeds"
if "$target" "${options[@]}" "$found" "$seeds" >"$log" 2>&1; then
  printf '%s: fine, %s\n' "$name" "$(tail -n 1 "$log")"
else
  printf '%s: failed, see %s; its end:\n' "$name" "$log"
  tail -n 40 "$log"
  exit 1
fi

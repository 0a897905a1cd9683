#!/usr/bin/env bash
# The main job on real input: scripts/demo.sh SPOLIA, where SPOLIA is the built command.
# A checkpoint that PyTorch's FSDP2 wrote on four ranks, AdamW's moments included, becomes a Hugging Face folder in
# build/demo, and every tensor is proved to have the bytes that PyTorch itself saw.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.."

spolia=$1
fixture=tests/data/torch-2.14/fsdp2-4
source=$fixture/checkpoint
out=build/demo
target=$out/converted

show() {
  printf '\n$ spolia %s\n' "$*"
  "$spolia" "$@"
}

# The lines of `spolia digest`, from what PyTorch hashed when it wrote the checkpoint.
expected_digests() {
  awk '
    function text(line) { sub(/^[^:]*: "/, "", line); sub(/",?$/, "", line); return line }
    /^ "/ { inside = /^ "tensors": / }
    !inside { next }
    /^  "/ { name = $0; sub(/^  "/, "", name); sub(/": \{$/, "", name); shape = "" }
    /^   "dtype": / { dtype = text($0) }
    /^   "sha256": / { sha256 = text($0) }
    /^    / { gsub(/[ ,]/, ""); shape = shape (shape == "" ? "" : "x") $0 }
    /^  \}/ { print sha256 "  " dtype "  " (shape == "" ? "scalar" : shape) "  " name }
  ' "$fixture/expected.json"
}

same() {
  diff "$1" "$2" || {
    printf 'demo: %s and %s differ\n' "$1" "$2" >&2
    exit 1
  }
}

rm -rf "$out"
mkdir -p "$out"
show inspect "$source"

began=${EPOCHREALTIME/./}
show convert "$source" "$target" --to safetensors --memory 32MiB
micros=$((${EPOCHREALTIME/./} - began))

"$spolia" digest "$source" >"$out/source.digests"
"$spolia" digest "$target" >"$out/converted.digests"
expected_digests >"$out/expected.digests"
same "$out/expected.digests" "$out/source.digests"
same "$out/source.digests" "$out/converted.digests"

bytes=$(find "$target" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }')
printf '\n%d tensors, %d bytes: %s became %s\n' "$(wc -l <"$out/expected.digests")" "$bytes" "$source" "$target"
awk -v micros="$micros" -v bytes="$bytes" \
  'BEGIN { printf "in %.3f s, starting the command and syncing the files included: %.1f MB/s\n", micros / 1e6, bytes / micros }'
echo "SHA-256 of every tensor: PyTorch's own = read from the checkpoint = read from the converted folder"

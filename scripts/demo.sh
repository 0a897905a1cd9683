#!/usr/bin/env bash
# The main job on real input: scripts/demo.sh SPOLIA, where SPOLIA is the built command.
# A checkpoint that PyTorch's FSDP2 wrote on four ranks, AdamW's moments included, is laid out anew for three ranks, and
# from there for a mesh of 2x2; then it becomes a folder of Spolia's own, and at last a Hugging Face folder. After each
# step every tensor is proved to have the bytes that PyTorch itself saw. All results are in build/demo.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.."

spolia=$1
fixture=tests/data/torch-2.14/fsdp2-4
source=$fixture/checkpoint
out=build/demo

say() { printf '\n%s\n' "$*"; }

show() {
  printf '$ spolia %s\n' "$*"
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

# prove CHECKPOINT: each of its tensors has the digest that PyTorch gave it.
prove() {
  "$spolia" digest "$1" | diff "$out/expected.digests" - || {
    printf 'demo: %s is not what PyTorch wrote\n' "$1" >&2
    exit 1
  }
  printf 'the SHA-256 of each of %d tensors is the one that PyTorch saw\n' "$(wc -l <"$out/expected.digests")"
}

rm -rf "$out"
mkdir -p "$out"
expected_digests >"$out/expected.digests"

say "What PyTorch wrote on four ranks:"
show inspect "$source" | sed -n '1,8p; 9s/.*/.../p; $p'
prove "$source"

say "For three ranks, each with a third of the rows:"
echo 'mesh = 3; *: [shard(0)]' | tee "$out/rows.layout"
show convert "$source" "$out/rows" --to dcp --layout "$out/rows.layout"
prove "$out/rows"

say "From there for a mesh of 2x2, data parallel by tensor parallel:"
tee "$out/mesh.layout" <<'TEXT'
mesh = 2x2 (dp, tp)
*:                 [shard(0)] over (dp)
*.embed_tokens.*:  [shard(1), shard(0)]
*.down_proj.*:     [shard(0), shard(1)]
*.up_proj.*:       [strided(0, 2), shard(0)]
TEXT
show convert "$out/rows" "$out/mesh" --to dcp --layout "$out/mesh.layout" --verify
prove "$out/mesh"
show inspect "$out/mesh" --chunks | sed -n '1p; / model\.model\.layers\.0\.mlp\.\(down\|up\)_proj/,/__3_0/p'
show verify "$out/mesh"
show diff "$source" "$out/mesh"

say "From there into a folder of Spolia's own, and into a Hugging Face folder:"
show convert "$out/mesh" "$out/own" --to spolia
prove "$out/own"
began=${EPOCHREALTIME/./}
show convert "$out/own" "$out/converted" --to safetensors --memory 32MiB
micros=$((${EPOCHREALTIME/./} - began))
prove "$out/converted"
bytes=$(find "$out/converted" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }')
awk -v micros="$micros" -v bytes="$bytes" 'BEGIN {
  printf "the last one wrote %d bytes in %.3f s, starting the command and syncing the files included: %.1f MB/s\n",
    bytes, micros / 1e6, bytes / micros }'

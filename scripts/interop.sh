#!/usr/bin/env bash
# A real PyTorch and Spolia read what the other wrote: scripts/interop.sh SPOLIA [SEED], where SPOLIA is the built
# command, in a build tree that has tests/save_on_ranks too. PyTorch writes checkpoints whose sizes, placements and bytes
# follow from the seed; Spolia digests them, converts them to all its formats, for many layouts, and saves them from
# ranks; PyTorch reads the results. Every tensor's SHA-256 and every value must be what PyTorch had before it wrote them.
#
# Python comes from SPOLIA_PYTHON (a command); or it is python3, if that has torch and safetensors; or that of a Debian
# root which is made in build/torch, or named by SPOLIA_TORCH_ROOT. `scripts/interop.sh --has-python` says whether
# there is one already. Exit code 1: something differs. 2: it cannot run.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_root=${SPOLIA_TORCH_ROOT:-$PWD/build/torch}
python=()  # the command
base=      # the folder that is the command's /

cannot() {
  printf 'interop cannot run: %s\n' "$*" >&2
  exit 2
}

find_python() {
  if [[ -n ${SPOLIA_PYTHON:-} ]]; then
    read -ra python <<<"$SPOLIA_PYTHON"
  elif python3 -c 'import torch, safetensors.torch' 2>/dev/null; then
    python=(python3)
  elif [[ -d $torch_root ]] && ((EUID == 0)); then
    base=$torch_root
    python=(chroot "$base" python3)
    # PyTorch wants /proc. Mounted in a namespace of its own, it is gone with the process.
    if unshare --mount mount -t proc proc "$base/proc" 2>/dev/null; then
      # shellcheck disable=SC2016
      python=(unshare --mount sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" python3 "$@"' "$base")
    fi
  else
    return 1
  fi
}

make_torch_root() {
  local why='no Python with torch and safetensors is here' \
    how='Name one in SPOLIA_PYTHON, or install both for python3, or run this as root, with debootstrap and a network.'
  ((EUID == 0)) || cannot "$why, and a Debian root with them can only be made as root. $how"
  command -v debootstrap >/dev/null || cannot "$why, and there is no debootstrap to make a Debian root with them. $how"
  printf '== making %s, a Debian root with PyTorch; this takes some minutes\n' "$torch_root"
  mkdir -p build
  scripts/torch_root.sh "$torch_root" </dev/null >build/torch.log 2>&1 ||
    cannot "$why, and making a Debian root failed; build/torch.log says why. $how"
}

if [[ ${1:-} == --has-python ]]; then
  find_python
  exit
fi
spolia=$(realpath "$1")
save_on_ranks=$(realpath "$(dirname "$1")/../tests/save_on_ranks")
seed=${2:-$(date +%s)}
if ! find_python; then
  make_torch_root
  find_python
fi
"${python[@]}" -c 'import torch, safetensors.torch' ||
  cannot "${base:-${python[*]}} has no torch and safetensors for Python. Install them there, or name another Python" \
    "in SPOLIA_PYTHON."

mkdir -p "$base/tmp"
work=$(mktemp -d "$base/tmp/spolia-interop.XXXXXX")
in_python=${work#"$base"}  # the same folder, as Python sees it
cp tests/interop/*.py "$work/"

finish() {
  if (($1 == 0)); then
    rm -rf "$work"
  else
    printf 'interop: failed with seed %s; all that was made is kept in %s\n' "$seed" "$work" >&2
  fi
}
trap 'finish $?' EXIT

# PyTorch is talkative on stderr, which is shown where something failed.
run_python() {
  local script=$1
  shift
  "${python[@]}" -W ignore "$in_python/$script" "$in_python/cases" "$@" 2>"$work/log" && return
  { grep -v '^\[./gloo/' "$work/log" || true; } | tail -n 40 >&2
  exit 1
}

# from CASE: what follows is written from the checkpoint of that case; from CASE RESULT: from that result.
from() {
  case=$work/cases/$1
  source=$(echo "$case"/checkpoint*)
  [[ $# == 1 ]] || source=$case/written/$2
}

# to RESULT FORMAT [LAYOUT [OPTION]...]
to() {
  local result=$case/written/$1 format=$2 options=("${@:4}")
  [[ -z ${3:-} ]] || options+=(--layout "$3")
  "$spolia" convert "$source" "$result" --to "$format" --no-sync --quiet "${options[@]}"
  "$spolia" digest "$result" --json >"$result.json"
}

# saved RESULT FORMAT RANKS LAYOUT: as a job on so many ranks would save it.
saved() {
  local result=$case/written/$1
  "$save_on_ranks" "$source" "$result" "$2" "$3" "$4"
  "$spolia" digest "$result" --json >"$result.json"
}

readonly rows='mesh = 3; *: [shard(0)]'
readonly columns='mesh = 5 (tp) on [0, 1, 2, 3, 9]; *: [shard(-1)]'
readonly blocks='mesh = 2x2 (dp, tp); *: [shard(0), shard(-1)]'
readonly hybrid='mesh = 2x3 (replica, shard); *: [shard(0)] over (shard)'
readonly strided='mesh = 3x2 (dp, tp); *: [strided(0, 2), shard(0)]'
readonly ragged='mesh = 4; *: [shard(0, balanced)]; even.matrix: [ragged(0, [3, 0, 2, 1])];
                 even.cube: [ragged([0, 1], [1, 5, 0, 6])]; shapes.wide: [strided(1, 3, chunked)]'

began=$SECONDS
printf '== PyTorch writes checkpoints, seed %s\n' "$seed"
run_python make_checkpoints.py --seed "$seed"

printf '== Spolia reads and converts them\n'
for case in "$work"/cases/*; do
  "$spolia" digest "$case"/checkpoint* --json >"$case/digest.json"
  mkdir "$case/written"
done
for name in fsdp-5 fsdp-tp-3x2 mesh-2x3 torch-save; do
  from $name
  to whole dcp
  to rows dcp "$rows" --threads 1
  to columns dcp "$columns" --verify
  to blocks dcp "$blocks"
  to hybrid dcp "$hybrid"
  to strided dcp "$strided" --no-verify
  to spolia spolia
  to spolia-blocks spolia "$blocks" --verify
  to spolia-strided spolia "$strided"
  from $name spolia
  to spolia-whole-to-columns dcp "$columns"
  from $name spolia-blocks
  to spolia-blocks-to-rows dcp "$rows"
  from $name strided
  to strided-to-spolia-hybrid spolia "$hybrid"
done
for name in fsdp-5 fsdp-tp-3x2 mesh-2x3 torch-save hugging-face; do
  from $name
  to by-3-ranks dcp '' --ranks 3
  to by-4-ranks-blocks dcp "$blocks" --ranks 4 --verify
  to by-5-ranks-spolia spolia "$hybrid" --ranks 5
  saved saved-rows dcp 3 "$rows"
  saved saved-hybrid dcp 6 "$hybrid"
  saved saved-strided dcp 8 "$strided"
  saved saved-blocks-spolia spolia 4 "$blocks"
  from $name saved-blocks-spolia
  to saved-spolia-to-columns dcp "$columns" --ranks 2
done
for name in mesh-2x2 mesh-3 torch-save; do
  from $name
  saved saved-ragged dcp 4 "$ragged"
  to ragged dcp "$ragged"
  to spolia-ragged spolia "$ragged"
  from $name ragged
  to ragged-to-whole dcp
  to ragged-to-safetensors safetensors '' --drop '*complex128*'
done
for name in hugging-face hugging-face-bin hugging-face-shards-4 rank-files-3 safetensors; do
  from $name
  to blocks dcp "$blocks"
  to spolia-rows spolia "$rows"
  from $name blocks
  to blocks-to-safetensors safetensors '' --max-shard-size 1000
done
for name in fsdp-5 fsdp-tp-3x2; do
  from $name
  to model-rows dcp "$rows" --root model
  to model-safetensors safetensors '' --root model --max-shard-size 10KB
done

printf '== the proofs\n'
run_python read_checkpoints.py
printf 'in %d s\n' $((SECONDS - began))

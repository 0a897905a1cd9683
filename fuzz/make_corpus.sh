#!/usr/bin/env bash
# Collects the seeds of a fuzz target from the checkpoints in tests/data: fuzz/make_corpus.sh NAME FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export LC_ALL=C  # bytes are bytes

name=$1
folder=$2
readonly largest=40k  # larger seeds make slow runs

mkdir -p "$folder"
rm -f "$folder"/*

# add: a seed from standard input.
add() { cat >"$(mktemp "$folder/XXXXXXXX")"; }

# files PATTERN: the small files of all checkpoints whose name matches.
files() { find tests/data -path "*/checkpoint/*" -name "$1" -size "-$largest" | sort; }

add_files() {
  local file
  while read -r file; do add <"$file"; done < <(files "$1")
}

# Archives of torch.save: a DCP checkpoint with one item a file has nothing else.
items() { find tests/data/*/files-per-item-2/checkpoint -name '*.distcp' | sort; }

# cut_bytes FILE BEGIN END: the bytes [BEGIN, END); END may be missing.
cut_bytes() {
  dd if="$1" iflag=skip_bytes,count_bytes skip="$2" ${3:+count=$(($3 - $2))} status=none
}

# offsets FILE PATTERN: where the pattern is met.
offsets() { grep -obUaP "$2" "$1" | sed 's/:.*//'; }

# The pickle of a torch.save archive: from its first opcode to the next record.
add_pickle() {
  local begin end
  begin=$(offsets "$1" '\x80\x02' | sed -n 1p)
  end=$(offsets "$1" 'PK(\x03\x04|\x07\x08)' | awk -v begin="$begin" '$1 > begin' | sed -n 1p)
  cut_bytes "$1" "$begin" "$end" | add
}

# add_zstd_frames PREFIX: the frames of a compressed checkpoint, each with the prefix before it.
add_zstd_frames() {
  local file begins i
  for file in tests/data/*/zstd-2/checkpoint/*.distcp; do
    mapfile -t begins < <(offsets "$file" '\x28\xb5\x2f\xfd')
    for i in "${!begins[@]}"; do
      { printf '%s' "${1:-}"; cut_bytes "$file" "${begins[i]}" "${begins[i + 1]:-}"; } | add
    done
  done
}

case $name in
  safetensors) add_files '*.safetensors' ;;
  weight_index) add_files '*.index.json' ;;
  sharding_info)
    while read -r file; do
      { grep -aoP '"DCP_SHARDING_INFO":"\K([^"\\]|\\.)*' "$file" || true; } | sed 's/\\"/"/g' | add
    done < <(files 'shard-*.safetensors')
    ;;
  dcp_metadata) add_files .metadata ;;
  pickle)
    add_files .metadata
    for file in $(items); do add_pickle "$file"; done
    ;;
  tensor_pickle)
    for file in $(items) tests/data/*/rank-files-2/checkpoint/*.pt tests/data/*/torch-save-1/checkpoint/*.pt; do
      add_pickle "$file"
    done
    ;;
  zip | torch_save) for file in $(items); do add <"$file"; done ;;
  dcp_item)
    for file in $(items); do add <"$file"; done
    add_zstd_frames
    ;;
  byte_source)
    add_zstd_frames ' '
    for file in $(items); do { printf '!'; gzip -c <"$file" | tail -c +11 | head -c -8; } | add; done
    ;;
  spolia_manifest)
    start='"version":1'
    file='"bytes":1,"sha256":"'$(printf '%064d' 0)'"'
    { printf '{"format":"spolia",%s,"block_bytes":4,"layouts":["[shard(0)] over 2"],"parts":[' "$start"
      printf '{"writer":0,"file":"p",%s}],"tensors":[' "$file"
      printf '{"name":"w","dtype":"int8","shape":[4,3],"chunks":1,"layout":0,"replica":0}],"values":['
      printf '{"name":"a","value":{"$tuple":[1.5,{"$bytes":"00"},{"$dict":[[1,{"$float":"nan"}]]}]}}]}'
      printf '\0{"format":"spolia part",%s,"data":{"file":"d","bytes":14},"header":{"bytes":8},' "$start"
      printf '"chunks":[{"tensor":0,"offset":8,"crc32":"0000000100000002"}]}'
    } | add
    { printf '{"format":"spolia",%s,"layouts":[],"parts":[{"writer":7,"file":"p",%s}],"tensors":[' "$start" "$file"
      printf '{"name":{"$text":"ff"},"dtype":"bfloat16","shape":[2,2],"chunks":2,"requires_grad":true,'
      printf '"memory_format":"channels_last","path":["a",0]}],"values":[{"name":"o","file":"v",%s}]}' "$file"
      printf '\0{"format":"spolia part",%s,"data":{"file":"d","bytes":16},"header":{"bytes":8},"chunks":[' "$start"
      printf '{"tensor":0,"offset":8,"box":[[0,0],[1,2]]},{"tensor":0,"offset":12,"box":[[1,0],[1,2]]}]}'
    } | add
    { printf '{"format":"spolia",%s,"layouts":["[replicate] over 2"],"parts":[{"writer":0,"file":"p",%s}],' "$start" "$file"
      printf '"tensors":[{"name":"w","dtype":"int8","shape":[2],"layout":0}]}'
      printf '\0{"format":"spolia part",%s,"data":{"file":"d","bytes":14},"header":{"bytes":8},"chunks":[' "$start"
      printf '{"tensor":0,"offset":8},{"tensor":0,"offset":10},{"tensor":0,"offset":12,"box":[[0],[2]]}]}'
    } | add
    ;;
  description)
    # Numbers of 64 bits, little end first; texts after their lengths.
    number() { printf "\\x$(printf %02x $(($1 & 255)))\\x$(printf %02x $(($1 >> 8 & 255)))\0\0\0\0\0\0"; }
    text() { number ${#1}; printf '%s' "$1"; }
    minus_one() { printf '\xff\xff\xff\xff\xff\xff\xff\xff'; }
    { number 1; text '[shard(0)] over 2'
      number 2
      text a; number 1; number 1; text a; text float32; number 2; number 6; number 3; number 1; number 0; number 0
      text b; number 1; number 0; number 4; text int8; number 1; number 5; number 2; minus_one
      number 1; number 1; number 1; number 4; number 77
      number 1; text step; number 1; number 1; text step; number 99
    } | add
    { number 0; number 0; number 0; } | add
    { number 2; text '[ragged([0, 1], [1, 0])] over 2'; text '[replicate, strided(0, 2)] over 1x2 on [1, 0]'
      number 2
      text '' ; number 0; text uint8; number 2; number 2; number 2; number 0; number 0; number 0
      text x; number 0; text bfloat16; number 1; number 8; number 3; number 1; number 0
      number 0
    } | add
    ;;
  mapping)
    for text in 'a, b -> c, axis=0\nc^T -> d\0a:f24 b:f34' 'a -> b, c, axis=1\nc -> _; b -> e, permute="[1, 0]"\0a:f26' \
      'a -> q, k, v, fused_qkv, num_heads=2, num_key_value_groups=1\0a:b28 state.a.exp_avg:f28 state.a.step:f' \
      'l.$LAYER_ID.e.*.w -> m.$LAYER_ID, axis=0\0l.0.e.0.w:f22 l.0.e.1.w:f22 l.1.e.0.w:f22' \
      'a -> b, reshape="[2, 3, 4]", dtype="float16"\n_ -> n, shape="[2]", dtype="float32", fill=0\0a:f64' \
      'g, u -> w, fused_ffn, dst_tp=2\n"x" -> x\0g:f24 u:f24 x:i2 x.moment1_0:f2\0w:f28 x:i2 x.moment1_0:f2' \
      'e.[0:2].w -> all, axis=0, sizes="equal"; a[0:2] -> b, axis=0\0e.0.w:f22 e.1.w:f22 a_0:f1 a_1:f2' \
      '{"aoa_statements": ["a^T -> c", "_ -> n"], "aoa_config_reverse": true}\0c:f24\0a:f42'; do
      printf "$text" | add
    done
    ;;
  text)
    for text in 'replicate' 'shard(-1)' 'shard(0, balanced)' 'strided(0, 2, chunked)' 'partial(sum)' \
      'ragged([0, 1], [3, 1, 0])' '64MiB' '5GB' '512k' 'model.*.weight\0model.layers.0.weight' '*a?b*\0xaybab'; do
      printf "$text" | add
    done
    ;;
esac

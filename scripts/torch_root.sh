#!/usr/bin/env bash
# Makes a Debian root with PyTorch and safetensors for Python: scripts/torch_root.sh DIR. Takes root, debootstrap and
# the network. DIR appears when it is complete, or not at all. Nothing outside it is touched.
set -euo pipefail

root=$(realpath -m "$1")
partial=$root.partial

# What is mounted beneath it, the innermost first.
unmount_all() {
  awk -v beneath="$partial/" 'index($2, beneath) == 1 { print $2 }' /proc/self/mounts | LC_ALL=C sort -r |
    xargs -r -n 1 umount
}

clean() {
  unmount_all
  rm -rf --one-file-system "$partial"
}

mkdir -p "${root%/*}"
clean
trap clean EXIT
debootstrap --variant=minbase sid "$partial"
export DEBIAN_FRONTEND=noninteractive
chroot "$partial" apt-get -o Acquire::Check-Valid-Until=false update
chroot "$partial" apt-get -o Dpkg::Options::=--force-unsafe-io install -y --no-install-recommends \
  python3-torch python3-safetensors
chroot "$partial" apt-get clean
chroot "$partial" python3 -c 'import torch, safetensors.torch'
unmount_all
mv "$partial" "$root"
trap - EXIT

#!/usr/bin/env bash
# The training example on several meshes: train_lm.sh TRAIN_LM TEXT [MPIEXEC]. Losses of 12 steps are one rank's within
# 1e-4, the same bits where the mesh is the same; a run that was resumed goes on as one that was not, on any mesh.
set -euo pipefail
export LC_ALL=C
train_lm=$1 text=$2 mpiexec=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

losses() { "$@" | grep '^step='; }

# near A B: the same steps, and losses that differ by at most 1e-4 of themselves.
near() {
  paste "$1" "$2" | awk '{
    split($2, a, "="); split($4, b, "=");
    difference = a[2] - b[2]; if (difference < 0) difference = -difference;
    if ($1 != $3 || a[2] == "" || b[2] == "" || difference > 1e-4 * a[2]) { print "differ: " $0; bad = 1 }
  } END { exit bad || NR == 0 }'
}

fail() {
  printf 'FAILED: %s\n' "$*" >&2
  exit 1
}

losses "$train_lm" "$text" --steps 12 --batch 6 >"$work/one"
for mesh in 2x1 1x2 2x2 1x3 3x2; do
  losses "$train_lm" "$text" --steps 12 --batch 6 --mesh $mesh >"$work/$mesh"
  near "$work/one" "$work/$mesh" || fail "$mesh is not one rank's"
done
losses "$train_lm" "$text" --steps 12 --batch 6 --mesh 2x2 | cmp - "$work/2x2" || fail "2x2 differs from itself"

"$train_lm" "$text" --steps 6 --batch 6 --mesh 2x2 --save "$work/run" --every 4 >"$work/log"
losses "$train_lm" "$text" --steps 12 --batch 6 --mesh 2x2 --resume "$work/run" >"$work/resumed"
tail -6 "$work/2x2" | cmp - "$work/resumed" || fail "a resumed run differs from an unbroken one"
for mesh in 1x1 1x3 3x2; do
  losses "$train_lm" "$text" --steps 12 --batch 6 --mesh $mesh --resume "$work/run" >"$work/resumed"
  near <(tail -6 "$work/one") "$work/resumed" || fail "resumed on $mesh it is not one rank's"
done

if [[ -n "$mpiexec" ]]; then
  losses "$mpiexec" -n 4 "$train_lm" "$text" --steps 12 --batch 6 --mesh 2x2 --save "$work/mpi" --every 6 >"$work/mpi.losses"
  cmp "$work/2x2" "$work/mpi.losses" || fail "processes differ from threads"
  losses "$mpiexec" -n 2 "$train_lm" "$text" --steps 14 --batch 6 --mesh 1x2 --resume "$work/mpi" >"$work/resumed"
  [[ $(wc -l <"$work/resumed") == 2 ]] || fail "resuming under mpirun"
fi
echo "all as it should be"

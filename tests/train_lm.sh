#!/usr/bin/env bash
# The training example on several meshes: train_lm.sh TRAIN_LM TEXT [MPIEXEC]. Losses of 12 steps are one rank's within
# 1e-4, the same bits where the mesh is the same; a run that was resumed goes on as one that was not, on any mesh. All of
# that with NorMuon and QK-clip too.
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

# same_training NAME OPTIONS...
same_training() {
  local name=$1 mesh run
  shift
  run() { losses "$train_lm" "$text" --steps 12 --batch 6 "$@"; }
  run "$@" >"$work/$name.one"
  for mesh in 2x1 1x2 2x2 1x3 3x2; do
    run "$@" --mesh $mesh >"$work/$name.$mesh"
    near "$work/$name.one" "$work/$name.$mesh" || fail "$mesh is not one rank's ($*)"
  done
  run "$@" --mesh 2x2 | cmp - "$work/$name.2x2" || fail "2x2 differs from itself ($*)"

  "$train_lm" "$text" --steps 6 --batch 6 "$@" --mesh 2x2 --save "$work/$name.run" --every 4 >"$work/log"
  run "$@" --mesh 2x2 --resume "$work/$name.run" >"$work/resumed"
  tail -6 "$work/$name.2x2" | cmp - "$work/resumed" || fail "a resumed run differs from an unbroken one ($*)"
  for mesh in 1x1 1x3 3x2; do
    run "$@" --mesh $mesh --resume "$work/$name.run" >"$work/resumed"
    near <(tail -6 "$work/$name.one") "$work/resumed" || fail "resumed on $mesh it is not one rank's ($*)"
  done
}

same_training plain
same_training clipped --normuon --qk-clip 1
near "$work/plain.one" "$work/clipped.one" >"$work/log" && fail "NorMuon and QK-clip change nothing"
"$train_lm" "$text" --steps 2 --mesh 2x1 | grep -q '^2 steps of .* Newton-Schulz; [1-9][0-9]* bytes' || fail "no summary"

if [[ -n "$mpiexec" ]]; then
  losses "$mpiexec" -n 4 "$train_lm" "$text" --steps 12 --batch 6 --mesh 2x2 --save "$work/mpi" --every 6 >"$work/mpi.losses"
  cmp "$work/plain.2x2" "$work/mpi.losses" || fail "processes differ from threads"
  losses "$mpiexec" -n 2 "$train_lm" "$text" --steps 14 --batch 6 --mesh 1x2 --resume "$work/mpi" >"$work/resumed"
  [[ $(wc -l <"$work/resumed") == 2 ]] || fail "resuming under mpirun"
fi
echo "all as it should be"

#!/usr/bin/env bash
# usage: mpi_endings.sh MPIEXEC PROGRAM: how jobs end under mpirun, when all is well and when it is not.
set -uo pipefail
mpiexec=$1
program=$2
failed=0

# expect zero|nonzero|any TEXT COMMAND...: the command ends so, within a minute, and says the text.
expect() {
  local status=$1 text=$2 output result
  shift 2
  output=$(timeout 60 "$@" 2>&1)
  result=$?
  if { [[ $status == zero ]] && ((result != 0)); } || { [[ $status == nonzero ]] && ((result == 0)); } ||
    ((result == 124)) || [[ "$output" != *"$text"* ]]; then
    printf 'FAILED: %s\n  exit %s, expected %s and "%s"; it said:\n%s\n' "$*" "$result" "$status" "$text" "$output"
    failed=1
  else
    printf 'ok: %s\n' "$*"
  fi
}

expect zero "" "$mpiexec" -n 3 "$program" fine
expect zero "" "$program" fine  # one rank, without MPI
# Each way one rank fails: the job ends, with an error.
expect nonzero "rank 1: nothing there" "$mpiexec" -n 3 "$program" thrown
expect nonzero "rank 1: nothing there" "$mpiexec" -n 3 "$program" thrown-alone
expect nonzero "" "$mpiexec" -n 3 "$program" killed
# Where mpirun lets survivors live, they name who is gone; it may call that a success.
if [[ "$("$mpiexec" --version)" == *open-mpi.org* ]]; then
  expect any "rank 1 (which does not answer)" "$mpiexec" --enable-recovery -n 3 "$program" killed
fi
# Programs that have initialised MPI themselves keep it.
expect zero "" "$mpiexec" -n 2 "$program" host-multiple
expect nonzero "MPI_THREAD_MULTIPLE" "$mpiexec" -n 2 "$program" host-funneled
# Far from the plugin.
far=$(mktemp -d)
trap 'rm -rf "$far"' EXIT
cp "$program" "$far/program"
expect nonzero "the plugin spolia_mpi is not there" env SPOLIA_PLUGIN_PATH=/nowhere "$mpiexec" -n 2 "$far/program" fine
exit $failed

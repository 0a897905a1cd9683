#!/usr/bin/env bash
# Operations between processes: Spolia's against MPI's own, on the same ranks. usage: mpi_bench.sh [RANKS]
set -euo pipefail
build=${SPOLIA_BUILD:-build/bench}
if [[ ! -x "$build/bench/mpi_operations" ]]; then
  echo "skipped: mpi_operations is not built, as MPI is not found"
  exit 0
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
export SPOLIA_PLUGIN_PATH="$build/lib"
mpirun -n "${1:-4}" "$build/bench/mpi_operations"

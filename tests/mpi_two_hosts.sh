#!/usr/bin/env bash
# usage: mpi_two_hosts.sh MPIEXEC PROGRAM [ARGUMENT]...: runs a program under Open MPI's mpirun on two hosts, two ranks
# on each, which talk over TCP. The hosts are network namespaces of this machine with names of their own, joined by a
# cable (veth). Says "skipped" and exits with 77 where something that this takes is not here.
set -euo pipefail
mpiexec=$1
shift

skip() {
  echo "skipped: $*"
  exit 77
}
((EUID == 0)) || skip "network namespaces take root"
command -v ip unshare >/dev/null || skip "ip or unshare is not there"
[[ "$("$mpiexec" --version)" == *open-mpi.org* ]] || skip "$mpiexec is not Open MPI's"

# Names of an interface have at most 15 characters.
first=spolia-a-$$ second=spolia-b-$$ cable=sp$$
work=$(mktemp -d)
cleanup() {
  ip netns del "$first" 2>/dev/null || true
  ip netns del "$second" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
trap "exit 143" TERM INT
ip netns add "$first" 2>/dev/null || skip "network namespaces are not allowed here"
ip netns add "$second"
ip link add "${cable}a" netns "$first" type veth peer name "${cable}b" netns "$second"
ip -n "$first" addr add 10.231.77.1/24 dev "${cable}a"
ip -n "$second" addr add 10.231.77.2/24 dev "${cable}b"
for host in "$first" "$second"; do ip -n "$host" link set lo up; done
ip -n "$first" link set "${cable}a" up
ip -n "$second" link set "${cable}b" up
for ((i = 0; i < 100; ++i)); do  # the cable carries a moment later
  ends="$(ip -n "$first" -br link show "${cable}a") $(ip -n "$second" -br link show "${cable}b")"
  [[ "$ends" == *" UP "*" UP "* ]] && break
  sleep 0.05
done

# What mpirun calls to start something on the other host: AGENT HOST COMMAND...
cat >"$work/agent" <<AGENT
#!/bin/sh
shift
exec ip netns exec $second unshare --uts sh -c "hostname spolia-b && \$*"
AGENT
chmod +x "$work/agent"

export OMPI_MCA_plm_rsh_agent=$work/agent
export OMPI_MCA_oob_tcp_if_include=10.231.77.0/24 OMPI_MCA_btl_tcp_if_include=10.231.77.0/24
export OMPI_MCA_btl=self,vader,tcp OMPI_MCA_orte_tmpdir_base=$work
exec_on_first=(ip netns exec "$first" unshare --uts sh -c 'hostname spolia-a && exec "$@"' sh)
"${exec_on_first[@]}" "$mpiexec" -x OMPI_MCA_btl_vader_single_copy_mechanism=none -x SPOLIA_PLUGIN_PATH \
  --host 10.231.77.1:2,10.231.77.2:2 -n 4 "$@"

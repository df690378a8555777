#!/usr/bin/env bash
# Run a program on two nodes with one process each, connected by a link with the given rate. The
# nodes are network namespaces on this machine, so the script needs Linux and root. The arguments are
# the rate, the program, and the program's arguments.
#
#     bash results/lab/slow_link.sh 1gbit results/lab/links.py --largest 4
#     bash results/lab/slow_link.sh 1gbit real_model_example.py --strategy local_sgd --max_steps 20
set -euo pipefail
rate=$1; shift
nodes=("wire$$-0" "wire$$-1")
trap 'for node in "${nodes[@]}"; do ip netns del "$node" 2>/dev/null || true; done' EXIT
for node in "${nodes[@]}"; do ip netns add "$node"; done
ip link add eth0 netns "${nodes[0]}" type veth peer name eth0 netns "${nodes[1]}"
for i in 0 1; do
  ip -n "${nodes[i]}" addr add "10.99.0.$((i + 1))/24" dev eth0
  ip -n "${nodes[i]}" link set lo up
  ip -n "${nodes[i]}" link set eth0 up
  # As many bytes as the bucket holds pass without delay, so smaller tensors are not slowed down.
  # Gigabit rates need a large bucket.
  tc -n "${nodes[i]}" qdisc add dev eth0 root tbf rate "$rate" burst "${BURST:-1mb}" latency 200ms
done
for i in 1 0; do
  GLOO_SOCKET_IFNAME=eth0 ip netns exec "${nodes[i]}" torchrun --nnodes 2 --node_rank "$i" \
    --nproc_per_node 1 --master_addr 10.99.0.1 --master_port 29501 "$@" &
done
status=0
wait -n || status=$?
if [ "$status" != 0 ]; then kill $(jobs -p) 2>/dev/null || true; fi
wait || status=$?
exit "$status"

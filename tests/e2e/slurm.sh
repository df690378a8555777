#!/usr/bin/env bash
# Start a SLURM with two nodes, each with one fake GPU, on this namespace's loopback interface. It needs namespaces of
# its own: unshare --net --mount --uts --pid --fork --kill-child --mount-proc bash slurm.sh FOLDER
# Print "ready", then wait until standard input ends. Commands inside need SLURM_CONF=FOLDER/slurm.conf.
set -euo pipefail
dir=$1
mkdir -p "$dir"/{state,dev}
chmod 755 "$dir"
# Ranks that see a loopback address (127.x) of rank 0 believe that they run on its machine.
printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 node1' '10.77.0.2 node2' >"$dir/hosts"
mount --make-rprivate /
mount --bind "$dir/hosts" /etc/hosts
hostname node1
ip link set lo up
ip addr add 10.77.0.1/32 dev lo
ip addr add 10.77.0.2/32 dev lo
head -c 1024 /dev/urandom >"$dir/munge.key"
chmod 400 "$dir/munge.key"
munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --num-threads=2 \
    --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munge.seed"
: >"$dir/dev/gpu0"
cat >"$dir/gres.conf" <<END
NodeName=node[1-2] Name=gpu AutoDetect=off File=$dir/dev/gpu0
END
cat >"$dir/slurm.conf" <<END
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
AuthInfo=socket=$dir/munge.socket,cred_expire=5
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
NodeName=node1 NodeHostname=node1 NodeAddr=10.77.0.1 Port=6819 CPUs=32 RealMemory=900000 Gres=gpu:1 State=UNKNOWN
NodeName=node2 NodeHostname=node1 NodeAddr=10.77.0.2 Port=6820 CPUs=32 RealMemory=900000 Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$dir/slurm.conf
slurmctld
slurmd -N node1
slurmd -N node2
until [ "$(sinfo -h -N -t idle -o %N | sort -u | wc -l)" = 2 ]; do sleep 0.2; done
echo ready
exec cat

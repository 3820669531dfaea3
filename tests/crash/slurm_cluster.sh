#!/bin/bash
# A real Slurm of two nodes, n0 and n1, on this machine: `slurm_cluster.sh up FOLDER`, `slurm_cluster.sh down FOLDER`.
# As root on Debian: apt-get install --no-install-recommends slurm-wlm munge
set -eu
R=$2 H=$(hostname -s)
export SLURM_CONF=$R/slurm.conf
if [ "$1" = down ]; then
  # Jobs first: a slurmstepd outlives its slurmd.
  timeout 10 scancel --user=root || true
  for _ in $(seq 40); do [ -z "$(timeout 5 squeue -h)" ] && break; sleep 1; done
  for f in "$R"/run/*.pid; do [ -s "$f" ] && kill "$(cat "$f")" || true; done
  exit 0
fi
mkdir -p "$R"/{log,state,run,munge,spool/n0,spool/n1}
chmod 755 "$R" "$R/munge" # munged refuses folders that others may write to
dd if=/dev/urandom of="$R/munge/key" bs=1024 count=1 status=none
chmod 400 "$R/munge/key"
chown -R munge: "$R/munge"
runuser -u munge -- munged --force --key-file="$R/munge/key" --socket="$R/munge/socket" --pid-file="$R/munge/pid" \
  --log-file="$R/munge/log" --seed-file="$R/munge/seed"
cp "$R/munge/pid" "$R/run/munged.pid"
# The script's rendezvous is the name of the first node, as on any cluster.
for i in 0 1; do grep -qw "n$i" /etc/hosts || echo "127.0.0.1 n$i" >> /etc/hosts; done
# A job that is queued again waits for cred_expire; its number is in its rendezvous, which clusters beside each other
# must not share.
cat > "$SLURM_CONF" <<CONF
ClusterName=cairn
SlurmctldHost=$H(127.0.0.1)
SlurmctldPort=$3
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$R/munge/socket,cred_expire=15
FirstJobId=$((($3 - 26000) * 100 + 1))
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation=$R/state
SlurmdSpoolDir=$R/spool/%n
SlurmctldPidFile=$R/run/slurmctld.pid
SlurmdPidFile=$R/run/slurmd-%n.pid
SlurmctldLogFile=$R/log/slurmctld.log
SlurmdLogFile=$R/log/slurmd-%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
NodeName=n[0-1] NodeHostname=$H NodeAddr=127.0.0.1 Port=[$(($3 + 1))-$(($3 + 2))] CPUs=64 RealMemory=4000
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF State=UP
CONF
slurmctld -c -f "$SLURM_CONF"
for i in 0 1; do slurmd -N "n$i" -f "$SLURM_CONF"; done
for _ in $(seq 60); do [ "$(sinfo -h -N -p spot -t idle -o %N | sort -u | wc -l)" = 2 ] && exit 0; sleep 1; done
echo "the two nodes are not idle within a minute; see $R/log" >&2
exit 1

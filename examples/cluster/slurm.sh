#!/bin/bash
# Runs a file on the nodes of a Slurm job, with one Ray node on each; the command runs on the first.
#
#     sbatch slurm.sh cluster.yml -o trainer_adapters.here.num_workers 2
#
# The file's trainer adapter is `_type: ray` with `address: ${RAY_ADDRESS}`. The folder must be one that all nodes see,
# with the environment in which reinforge is installed active. Three minutes before the time limit, or when the job is
# preempted, the run stops where it can be resumed; the job is queued again and resumes it.
#SBATCH --job-name=reinforge
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
umask 077
name=slurm-$SLURM_JOB_ID
log=$name-ray.log
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on_first=(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}")

ip=$("${on_first[@]}" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000))        # several jobs may share a node
export RAY_ADDRESS=$ip:$port RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN     # anyone who reaches a cluster without a token can run code on it
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_worker_niceness=0                  # Ray's own 15 starves its workers beside other programs
start=(ray start --block --num-cpus="$SLURM_CPUS_PER_TASK" --dashboard-agent-listen-port=0)

: > "$log"
"${on_first[@]}" "${start[@]}" --head --node-ip-address="$ip" --port="$port" --include-dashboard=false >> "$log" 2>&1 &
head=$!
until grep -q "Ray runtime started" "$log"; do
    kill -0 $head || { cat "$log"; exit 1; }
    sleep 1
done
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "${start[@]}" --address="$RAY_ADDRESS" >> "$log" 2>&1 &
done

what=(--run_name "$name")
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then what=(--resume "$name"); fi
reinforge finetune "$1" "${what[@]}" "${@:2}" &
run=$!
stopped=
trap 'stopped=yes; kill -TERM $run' TERM
code=0
wait $run || code=$?
if [ -n "$stopped" ]; then                    # the signal ended the first `wait`; the run is still saving
    code=0
    wait $run || code=$?
    scontrol requeue "$SLURM_JOB_ID"
fi
trap - TERM
kill $(jobs -p) 2> /dev/null || true          # the nodes
wait
exit $code

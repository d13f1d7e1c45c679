#!/usr/bin/env bash
# A run as a heterogeneous job: component 0 learns (its first host also serves Redis), 1 generates, 2 serves rewards. Each
# has its own GPUs, and so has each task of component 1: one, or as many as worker.gpus says (--gpus-per-task=4 and
# --ntasks-per-node=2, for one). Component 0 starts a rank for each GPU of a host: learner.processes.
#
#   RUN_CONFIG=run.yaml RUN_NAME=big MODEL=/models/policy REWARD_MODEL=/models/reward sbatch docs/hosts/slurm.sh
#
# LEAST_LEARNERS=2: a model that has no room on the GPUs of one host learns on no fewer (default: 1).
#
#SBATCH --job-name=streamrl
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=64 --gpus-per-node=8 --exclusive
#SBATCH hetjob
#SBATCH --nodes=4 --ntasks-per-node=8 --cpus-per-task=8 --gpus-per-task=1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=1 --cpus-per-task=8 --gpus-per-task=1
set -euo pipefail
: "${RUN_CONFIG:?the configuration of the run}" "${RUN_NAME:?the name of the run}"
: "${MODEL:?the model}" "${REWARD_MODEL:?the reward model}"

nodes=${SLURM_JOB_NUM_NODES_HET_GROUP_0:-1}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
judge=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_2" | head -n 1)
private=$PWD/runs/$RUN_NAME/private  # on the disk that all hosts share
mkdir -p -m 700 "$private"
export REWARD_TOKEN_FILE=$private/reward-token
[ -s "$REWARD_TOKEN_FILE" ] || (umask 077; openssl rand -hex 32 > "$REWARD_TOKEN_FILE")

if [ -z "${STREAMRL_REDIS:-}" ]; then
  export STREAMRL_REDIS=redis://$head:6379 STREAMRL_REDIS_PASSWORD_FILE=$private/redis-password
  [ -s "$STREAMRL_REDIS_PASSWORD_FILE" ] || (umask 077; openssl rand -hex 32 > "$STREAMRL_REDIS_PASSWORD_FILE")
  mkdir -p "$private/redis"
  # The password in a file that only we can read: words of a command are seen by everybody on the host.
  {
    printf 'port 6379\ndir %s\nappendonly yes\nsave ""\nmaxmemory-policy noeviction\n' "$private/redis"
    printf 'requirepass %s\n' "$(cat "$STREAMRL_REDIS_PASSWORD_FILE")"
  } > "$private/redis.conf"
  srun --het-group=0 --nodes=1 --ntasks=1 --nodelist="$head" --overlap redis-server "$private/redis.conf" &
fi

# What has died is started again; a mistake (2) is not, for it would only be made again.
# shellcheck disable=SC2016
again=(bash -c 'trap exit TERM; for _ in $(seq 100); do code=0; "$@" || code=$?; '\
'case $code in 0 | 2) exit $code ;; esac; sleep 5; done; exit $code' again)

srun --het-group=2 "${again[@]}" \
  streamrl reward serve --model "$REWARD_MODEL" --host 0.0.0.0 --port 5555 --token-file "$REWARD_TOKEN_FILE" &

srun --het-group=1 --kill-on-bad-exit=0 "${again[@]}" \
  streamrl worker --redis "$STREAMRL_REDIS" --run "$RUN_NAME" --model "$MODEL" --allow-host "$judge:5555" &

# Before the time limit Slurm sends TERM to this script: the learner writes a checkpoint, and the job ends.
trap 'streamrl stop --redis "$STREAMRL_REDIS" --run "$RUN_NAME" --timeout-s 300 || true' TERM

srun --het-group=0 --ntasks-per-node=1 --overlap \
  streamrl learn "$RUN_CONFIG" name="$RUN_NAME" rewards.model.url="http://$judge:5555" \
  rewards.model.token_file="$REWARD_TOKEN_FILE" --redis "$STREAMRL_REDIS" \
  --nodes "${LEAST_LEARNERS:-1}:$nodes" --rendezvous "$head:29400" &
learner=$!
status=0
# A signal that was trapped ends `wait` early, and the learner is still there.
while kill -0 "$learner" 2>/dev/null; do wait "$learner" && status=0 || status=$?; done
exit "$status"

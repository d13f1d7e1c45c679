#!/usr/bin/env bash
# Start a run on hosts that ssh reaches and where this very folder, with its .venv, is to be found (NFS, or a copy; the
# run's folder must be shared by the learners).
#
#   LEARNERS="a b" WORKERS="c d" REWARD=e RUN_NAME=big MODEL=/models/policy REWARD_MODEL=/models/reward \
#     STREAMRL_REDIS=redis://host:6379 docs/hosts/ssh.sh run.yaml
#
# GPUS=8 GPUS_A_WORKER=1: of each host in WORKERS, which then starts a worker for each (worker.gpus is the same number, or
# auto); without GPUS it starts one, which takes what it finds. A learner takes the first learner.processes of its host.
# LEAST_LEARNERS=2: a model that has no room on the GPUs of one host learns on no fewer (default: 1).
#
# The reward server's token is the file reward-token in this folder: openssl rand -hex 32 > reward-token
#
# DIR is the folder of the runs (default: runs, in this folder); the configuration's own `dir` does not count. Logs lie
# in its NAME/logs. What is started goes on without this script; `streamrl drain` ends the run.
set -euo pipefail
config=${1:?usage: docs/hosts/ssh.sh CONFIG, with the variables that this file shows}
: "${LEARNERS:?hosts that learn}" "${WORKERS:?hosts that generate}" "${REWARD:?the host of the reward model}"
: "${RUN_NAME:?}" "${MODEL:?}" "${REWARD_MODEL:?}" "${STREAMRL_REDIS:?where Redis is, without a password}"

if [ -n "${GPUS:-}" ] && [[ " $LEARNERS $WORKERS " == *" $REWARD "* ]]; then
  echo "REWARD=$REWARD learns or generates too, and its GPUs are taken: name a host of its own" >&2
  exit 2
fi

read -ra learners <<< "$LEARNERS"
read -ra workers <<< "$WORKERS"
dir=${DIR:-runs}
logs=$(printf %q "$dir/$RUN_NAME/logs")

# start HOST NAME WORDS...: in the background there, with its output in a file. What has died is started again; a mistake
# (2) is not, for it would only be made again, nor is anything once a learner has found what no restart would mend ($0 is
# the file of such errors; an older one is of an earlier start).
start() {
  local host=$1 name=$2 line again
  shift 2
  # shellcheck disable=SC2016
  again='began=$(date +%s); for _ in $(seq 100); do code=0; "$@" || code=$?; case $code in 0 | 2) exit $code ;; esac
      [ "$(stat -c %Y "$0" 2> /dev/null || echo 0)" -lt "$began" ] || exit $code; sleep 5; done; exit $code'
  printf -v line '%q ' bash -c "$again" "$dir/$RUN_NAME/learner.error" "$@"
  ssh -n "$host" "cd $(printf %q "$PWD") && mkdir -p $logs && export PATH=\$PWD/.venv/bin:\$PATH" \
    "STREAMRL_REDIS_PASSWORD_FILE=$(printf %q "${STREAMRL_REDIS_PASSWORD_FILE:-}")" \
    "&& (setsid nohup bash -c $(printf %q "$line") > $logs/$name.out 2>&1 < /dev/null &)"
  echo "$host: $name"
}

start "$REWARD" reward \
  streamrl reward serve --model "$REWARD_MODEL" --host 0.0.0.0 --port 5555 --token-file "$PWD/reward-token"

for host in "${learners[@]}"; do
  start "$host" "learner-$host" \
    streamrl learn "$config" name="$RUN_NAME" dir="$dir" training.max_time=null \
    rewards.model.url="http://$REWARD:5555" rewards.model.token_file="$PWD/reward-token" --redis "$STREAMRL_REDIS" \
    --nodes "${LEAST_LEARNERS:-1}:${#learners[@]}" --rendezvous "${learners[0]}:29400"
done

worker=(streamrl worker --redis "$STREAMRL_REDIS" --run "$RUN_NAME" --model "$MODEL" --allow-host "$REWARD:5555")
each=${GPUS_A_WORKER:-1}
for host in "${workers[@]}"; do
  [ -n "${GPUS:-}" ] || start "$host" "worker-$host" "${worker[@]}"
  for ((first = 0; first + each <= ${GPUS:-0}; first += each)); do
    start "$host" "worker-$host-$first" env CUDA_DEVICE_ORDER=PCI_BUS_ID \
      CUDA_VISIBLE_DEVICES="$(seq -s , "$first" $((first + each - 1)))" "${worker[@]}"
  done
done

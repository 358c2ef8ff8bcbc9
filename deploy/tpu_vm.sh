#!/usr/bin/env bash
# Runs a preset on every host of a TPU VM slice without Kubernetes, and restarts it when the slice
# was preempted. /bucket is a shared folder of all hosts (Filestore, or a bucket under gcsfuse).
#     deploy/tpu_vm.sh NAME ZONE REPOSITORY_URL --preset stage1 --run-dir /bucket/stage1
set -euo pipefail
name=${1:?name of the TPU}; zone=${2:?zone}; repository=${3:?git URL that the hosts can clone}
shift 3
arguments=$(printf '%q ' "$@")

on_every_host() {
  gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$1"
}

install="test -d olmo3 || git clone --depth 1 $(printf %q "$repository") olmo3
cd olmo3 && python3 -m venv .venv && .venv/bin/pip install -q -e '.[tpu]'"

while true; do
  on_every_host "$install"
  code=0
  on_every_host "cd olmo3 && .venv/bin/python train.py $arguments" || code=$?
  case $code in
    0) exit 0 ;;  # done
    2) exit 2 ;;  # the configuration is at fault; a restart does not mend it
  esac
  echo "exit code $code; again in 30 s, from the newest checkpoint" >&2
  sleep 30
done

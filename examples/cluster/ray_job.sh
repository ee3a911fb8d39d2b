#!/usr/bin/env bash
# Submits a run to a Ray cluster that is up:
#
#   RAY_ADDRESS=http://HEAD:8265 SHARED=s3://bucket/run examples/cluster/ray_job.sh qwen3_8gpus
#
# RUN_DIR is on a disk of the head's; SHARED is a URL or a directory that every node sees, for
# checkpoints and the backup. Every node needs the same Python environment, with
# rhymeflow[ray,vllm]. Look before you submit: rhymeflow train RECIPE --dry-run=plan
set -euo pipefail

recipe=${1:-qwen3_8gpus}
run_dir=${RUN_DIR:-runs/$recipe}
shared=${SHARED:?a URL or a directory of all nodes, for this run alone}
: "${RAY_ADDRESS:?the address of the dashboard, such as http://HEAD:8265}"

rhymeflow train "$recipe" --dry-run=plan | grep '^#'
ray job submit --address "$RAY_ADDRESS" --submission-id "$recipe-$(date +%s)" -- \
  rhymeflow train "$recipe" --ray.address auto --run.output_dir "$run_dir" \
  --run.checkpoint_dir "$shared/checkpoints" --run.backup "$shared/backup"

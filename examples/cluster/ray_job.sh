#!/usr/bin/env bash
# Submits a run to a Ray cluster that is up:
#
#   RAY_ADDRESS=http://HEAD:8265 examples/cluster/ray_job.sh qwen3_8gpus
#
# RUN_DIR has to be a directory that every node sees, or one of the head's, with --run.backup where
# the run is to be resumed elsewhere. Every node needs the same Python environment, with
# rhymeflow[ray,vllm]. Look before you submit: rhymeflow train RECIPE --dry-run=plan
set -euo pipefail

recipe=${1:-qwen3_8gpus}
run_dir=${RUN_DIR:-runs/$recipe}
: "${RAY_ADDRESS:?the address of the dashboard, such as http://HEAD:8265}"

rhymeflow train "$recipe" --dry-run=plan | grep '^#'
ray job submit --address "$RAY_ADDRESS" --submission-id "$recipe-$(date +%s)" -- \
  rhymeflow train "$recipe" --ray.address auto --run.output_dir "$run_dir"

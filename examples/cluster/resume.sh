#!/bin/bash
# Starts a run that copies its folder to object storage, or resumes it: from the folder here, or else from its copy.
#
#     bash resume.sh NAME LOCATION FILE [OPTIONS]       bash resume.sh first s3://my-bucket/runs run.yml
#
# What starts a lost machine again, such as SkyPilot or Kubernetes, can call the same line each time. FILE has the
# default `output_dir`.
set -euo pipefail
name=$1 location=$2 file=$3
run=.reinforge/runs/$name

if [ ! -e "$run/run.sqlite" ]; then
    rm -rf "$run"                             # of a process that died before it wrote anything
    reinforge runs fetch "${location%/}/$name" --allow_missing
fi
what=(--run_name "$name")
if [ -e "$run/run.sqlite" ]; then what=(--resume "$run"); fi
exec reinforge finetune "$file" "${what[@]}" \
    -o finetuning.trackers.copy "{_type: mirror, location: '$location'}" "${@:4}"

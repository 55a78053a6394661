#!/bin/sh
# /app/eval_entrypoint.sh of the image: BENCHMARK_TASKS, BASE_MODEL, ADAPTER_PATH and the like say what is evaluated.
exec python -m gradeflow.evaluation.entrypoint --params "$(dirname -- "$0")/params.yaml" "$@"

# lm-evaluation-harness on vLLM, as constraints.txt pins them, with Gradeflow around it. From the repository's root:
#   docker build --file docker/evaluate.Dockerfile --tag gradeflow-evaluate:latest .
#   docker run --rm --gpus all --shm-size 8g --user "$(id -u):$(id -g)" --volume "$PWD/workspace:/workspace" \
#       --env BASE_MODEL=/workspace/models/NAME --env BENCHMARK_TASKS=gsm8k gradeflow-evaluate:latest
# CUDA comes with torch's wheels; the driver, through NVIDIA's container toolkit, from the host.
FROM python:3.11-slim-bookworm

# Triton compiles kernels with gcc; generated code is isolated by bubblewrap, or by Landlock with libseccomp.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc libc6-dev libseccomp2 \
    && rm -rf /var/lib/apt/lists/*

RUN pip install --no-cache-dir uv==0.13.9

WORKDIR /app
COPY pyproject.toml constraints.txt ./
# vLLM 0.31 takes only older fastapi and numpy than the rest of Gradeflow is pinned to, and chooses them itself here.
RUN grep --invert-match --extended-regexp '^(fastapi|numpy)==' constraints.txt > pins.txt \
    && uv pip install --system --no-cache --compile-bytecode --constraint pins.txt \
        --requirement pyproject.toml --extra train --extra vllm
COPY README.md LICENSE params.yaml ./
COPY src src
RUN uv pip install --system --no-cache --compile-bytecode --no-deps .
COPY --chmod=755 docker/evaluate-entrypoint.sh eval_entrypoint.sh

# Anyone may be --user: caches of compiled kernels go to a home that all can write, under a name that is always there.
RUN useradd --uid 1000 --create-home gradeflow \
    && chmod 1777 /home/gradeflow \
    && install --directory --owner gradeflow --group gradeflow \
        /workspace /workspace/benchmarks /workspace/benchmark_results
ENV HOME=/home/gradeflow \
    USER=gradeflow \
    HF_DATASETS_CACHE=/workspace/benchmarks \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["/app/eval_entrypoint.sh"]

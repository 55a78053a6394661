# vLLM as constraints.txt pins it, behind `gradeflow serve`. From the repository's root:
#   docker build --file docker/serve.Dockerfile --tag gradeflow-serve:latest .
#   docker run --rm --gpus all --shm-size 8g --publish 8000:8000 --env GRADEFLOW_API_KEY --env MLFLOW_TRACKING_URI=... \
#       --volume "$PWD/models:/project/models" gradeflow-serve:latest
# CUDA comes with torch's wheels; the driver, through NVIDIA's container toolkit, from the host.
FROM python:3.11-slim-bookworm

# Triton compiles kernels with gcc.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

RUN pip install --no-cache-dir uv==0.13.9

WORKDIR /app
COPY pyproject.toml constraints.txt ./
# vLLM 0.31 takes only older fastapi and numpy than the rest of Gradeflow is pinned to, and chooses them itself here.
RUN grep --invert-match --extended-regexp '^(fastapi|numpy)==' constraints.txt > pins.txt \
    && uv pip install --system --no-cache --compile-bytecode --constraint pins.txt \
        --requirement pyproject.toml --extra train --extra vllm --extra postgresql
COPY README.md LICENSE params.yaml ./
COPY src src
RUN uv pip install --system --no-cache --compile-bytecode --no-deps .

# Anyone may be --user: fetched adapters and compiled kernels go where all can write.
RUN useradd --uid 1000 --create-home gradeflow \
    && chmod 1777 /home/gradeflow \
    && install --directory --mode 1777 /project \
    && cp params.yaml /project/
ENV HOME=/home/gradeflow \
    USER=gradeflow \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1
USER 1000:1000
WORKDIR /project
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["gradeflow", "serve", "--serve.host", "0.0.0.0", "--serve.api_key_env", "GRADEFLOW_API_KEY", "--serve.backend", "vllm"]

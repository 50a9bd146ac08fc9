# Every target does its own set-up: python3 >= 3.11, make and a network to package registries are enough; for what
# compiles the join's hot modules (test, test-wheel, bench, chaos) a C compiler and Python's headers too.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv --quiet
# uv would pick up another activated environment; the project's own is meant, whatever the caller's shell says.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)

LOCKED_EXTRAS := agent enricher sinks reports html demo docs bench
COMPILE := $(UV) pip compile --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	--no-annotate --custom-compile-command "make lock" $(LOCK_ARGS)

# The wheel as users get it, compiled, in front of the checkout, which has the tests and benchmarks. Without
# PYTHONSAFEPATH, -m would put the checkout first.
ON_COMPILED := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/compiled:$(CURDIR)

# In up to four processes (tests/spreading.py), a file of tests at a time. With ARGS one looks for something: in one process,
# where --pdb and -x work, unless ARGS name a number of processes.
SPREAD := $(if $(ARGS),,-n auto)

.PHONY: help demo test test-extended test-compiled test-unit test-wheel test-tools compiled lint shape format bench chaos fuzz schemas docs docs-site lock sbom clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Run the whole way in one process and watch it (options: ARGS="--for 20s")
	@$(BIN)/gpuledger demo $(ARGS)

# With ARGS among the sources alone.
test: $(VENV)/.dev test-tools $(if $(ARGS),,test-compiled) ## Fetch and build the real parts, then run every test
	@$(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-extended: $(VENV)/.dev test-tools ## Run the long matrices that `make test` leaves out and the laws with all their examples, then make chaos (an hour)
	@$(BIN)/python -m tests.tools otel-collector
	@$(BIN)/python -m pytest $(SPREAD) --extended $(ARGS)
	@$(MAKE) --no-print-directory chaos ARGS=

test-compiled: $(VENV)/.dev compiled ## Run the laws of booking on the compiled modules of the wheel
	@TESTS_REQUIRE_COMPILED=1 $(ON_COMPILED) $(BIN)/python -m pytest tests/unit/enricher/join/booking $(ARGS)

test-unit: $(VENV)/.dev ## Run the tests that need nothing but Python
	@$(BIN)/python -m pytest $(SPREAD) tests/unit $(ARGS)

test-wheel: $(VENV)/.dev ## Build the wheel, which needs a C compiler, and test what it holds
	@$(BIN)/python -m pytest tests/wheel $(ARGS)

test-tools: $(VENV)/.dev ## Fetch and build the real parts that tests/real talks to
	@$(BIN)/python -m tests.tools

lint: $(VENV)/.dev ## ruff, mypy --strict, import-linter, and the tests of documents, locks and generated pages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/lint

shape: ## Count helpers with one caller, private functions, comments, and names that stand for two things
	@$(PYTHON) -m tests.shape

format: $(VENV)/.dev ## Let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Always built: hatch_build.py compiles what has changed, and knows better than make what that is.
compiled: $(VENV)/.uv ## Build the wheel and lay it out in build/compiled, as users get it
	@$(UV) pip install --no-deps --no-build-isolation --reinstall --target build/compiled .

bench: $(VENV)/.bench compiled ## Measure (one benchmark: ARGS="join --json figures.json")
	@$(ON_COMPILED) $(BIN)/python -m benchmarks $(ARGS)

chaos: $(VENV)/.dev compiled ## Kill, stop and restart what runs; count what is lost or there twice (ARGS="--seconds 60")
	@$(ON_COMPILED) $(BIN)/python -m tests.chaos $(ARGS)

# The seed is printed, so that what was found is found again: make fuzz FUZZ_SEED=…
FUZZ_COUNT ?= 2000
FUZZ_SEED := $(or $(FUZZ_SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
fuzz: $(VENV)/.dev ## Give every decoder 2,000 bad inputs, a quarter of an hour (a minute: FUZZ_COUNT=200; the same again: FUZZ_SEED=…)
	@echo "FUZZ_COUNT=$(FUZZ_COUNT) FUZZ_SEED=$(FUZZ_SEED)"
	@FUZZ_COUNT=$(FUZZ_COUNT) $(BIN)/python -m pytest $(SPREAD) tests/fuzz --hypothesis-seed=$(FUZZ_SEED) $(ARGS)

schemas: $(VENV)/.dev ## Generate docs/schemas/ from the records
	@$(BIN)/python -m gpuledger.schemas docs/schemas

docs: $(VENV)/.dev ## Generate the pages of docs/ that are made from the code
	@$(BIN)/python -m gpuledger_cli.docs_gen docs

# -E reads every page, because a cached page does not repeat its warnings.
SITE ?= build/site
docs-site: $(VENV)/.dev ## Build the site of docs/ in build/site; a warning, such as a broken link, is an error
	@$(BIN)/python -m sphinx -W --keep-going -E -q -j auto -c docs -d $(SITE).doctrees . $(SITE)

lock: $(VENV)/.uv ## Renew requirements/*.lock (newest allowed versions: LOCK_ARGS=--upgrade)
	@$(COMPILE) pyproject.toml --extra dev --output-file requirements/dev.lock
	@for extra in $(LOCKED_EXTRAS); do \
		$(COMPILE) pyproject.toml --extra $$extra --constraints requirements/dev.lock \
			--output-file requirements/$$extra.lock; done
	@$(COMPILE) requirements/bootstrap.in --constraints requirements/dev.lock \
		--output-file requirements/bootstrap.lock

SBOM_FOLDER ?= build/sbom
sbom: $(VENV)/.dev ## Write the Python packages of each image as CycloneDX JSON to build/sbom/, from requirements/*.lock
	@$(BIN)/python -m tests.sbom $(SBOM_FOLDER)

clean: ## Remove the environment and what tests and tools left behind
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

# A stamp is younger than the locks it was installed from, so nothing is installed twice. All locks hold the
# versions of dev.lock (make lock constrains them), so that they can take turns in one environment.
$(VENV)/.uv: requirements/bootstrap.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpuledger needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	@test -x $(BIN)/pip || { echo "making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

$(VENV)/.demo $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: requirements/%.lock pyproject.toml $(VENV)/.uv
	@echo "installing $<"
	@$(UV) pip install --require-hashes --requirement $<
	@$(UV) pip install --no-deps --no-build-isolation --editable .
	@touch $@

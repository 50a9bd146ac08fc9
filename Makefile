# Every target installs its own dependencies. Requirements: python3 >= 3.11, make and access to package registries.
# Targets that compile the hot modules (test, test-wheel, bench, chaos) also need a C compiler and Python's headers.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv --quiet
# Makes uv use the project's own environment, even if another one is activated in the caller's shell.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)

LOCKED_EXTRAS := agent enricher sinks reports html demo docs bench
COMPILE := $(UV) pip compile --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	--no-annotate --custom-compile-command "make lock" $(LOCK_ARGS)

# Imports the compiled wheel before the checkout, which has the tests and benchmarks. Without PYTHONSAFEPATH, -m would
# put the checkout first.
ON_COMPILED := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/compiled:$(CURDIR)

# Runs tests in up to four processes (tests/spreading.py), one test file at a time. With ARGS, tests run in one process,
# so that --pdb and -x work, unless ARGS set the number of processes.
SPREAD := $(if $(ARGS),,-n auto)

.PHONY: help demo test test-extended test-compiled test-unit test-wheel test-tools compiled lint shape format bench chaos fuzz schemas docs rendered docs-site lock sbom release clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Run all components in one process and show the results (options: ARGS="--for 20s")
	@$(BIN)/gpuledger demo $(ARGS)

# With ARGS, tests run only on the sources, not on the compiled modules.
test: $(VENV)/.dev test-tools $(if $(ARGS),,test-compiled) ## Download and build the real parts, then run all tests
	@$(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-extended: $(VENV)/.dev test-tools ## Run the tests that `make test` skips, more examples of the property tests, and make chaos (1 h; the first time, 1 h more to build KEDA)
	@$(BIN)/python -m tests.tools otel-collector munged mariadbd slurmdbd slurmctld slurmd sbatch sinfo sacct scancel \
		containerd ctr runc busybox node-kubelet kube-scheduler device-plugin dra-driver \
		kube-controller-manager prometheus-operator prometheus-adapter keda-operator keda-adapter
	@$(BIN)/python -m pytest $(SPREAD) --extended $(ARGS)
	@$(MAKE) --no-print-directory chaos ARGS=

test-compiled: $(VENV)/.dev compiled ## Run the property tests of booking on the wheel's compiled modules
	@TESTS_REQUIRE_COMPILED=1 $(ON_COMPILED) $(BIN)/python -m pytest tests/unit/enricher/join/booking $(ARGS)

test-unit: $(VENV)/.dev ## Run the tests that need only Python
	@$(BIN)/python -m pytest $(SPREAD) tests/unit $(ARGS)

test-wheel: $(VENV)/.dev ## Build the wheel and test its contents (needs a C compiler)
	@$(BIN)/python -m pytest tests/wheel $(ARGS)

test-tools: $(VENV)/.dev ## Download and build the real parts for tests/real
	@$(BIN)/python -m tests.tools

lint: $(VENV)/.dev ## Run ruff, mypy --strict, import-linter, and the tests of documents, locks and generated pages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/lint

shape: ## Count helpers with one caller, private functions, comments, and names with two meanings
	@$(PYTHON) -m tests.shape

format: $(VENV)/.dev ## Format the code, and apply ruff's automatic fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Always runs: hatch_build.py detects changed modules more precisely than make, and compiles only those.
compiled: $(VENV)/.uv ## Build the wheel and install it in build/compiled
	@$(UV) pip install --no-deps --no-build-isolation --reinstall --target build/compiled .

bench: $(VENV)/.bench compiled ## Run the benchmarks (only one: ARGS="join --json figures.json")
	@$(ON_COMPILED) $(BIN)/python -m benchmarks $(ARGS)

chaos: $(VENV)/.dev compiled ## Disturb components, count lost and duplicated records, and test alerts (ARGS="--seconds 60" or "--fault no-broker")
	@$(ON_COMPILED) $(BIN)/python -m tests.chaos $(ARGS)

# The seed is printed, so that a failure can be reproduced: make fuzz FUZZ_SEED=…
FUZZ_COUNT ?= 2000
FUZZ_SEED := $(or $(FUZZ_SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
fuzz: $(VENV)/.dev ## Test each decoder with 2,000 invalid inputs, 15 min (1 min: FUZZ_COUNT=200; repeat a run: FUZZ_SEED=…)
	@echo "FUZZ_COUNT=$(FUZZ_COUNT) FUZZ_SEED=$(FUZZ_SEED)"
	@FUZZ_COUNT=$(FUZZ_COUNT) $(BIN)/python -m pytest $(SPREAD) tests/fuzz --hypothesis-seed=$(FUZZ_SEED) $(ARGS)

schemas: $(VENV)/.dev ## Generate docs/schemas/ and the chart's schema from the records and settings
	@$(BIN)/python -m gpuledger.schemas docs/schemas
	@$(BIN)/python -m tests.docs_gen.chart_schema

docs: $(VENV)/.dev ## Generate the pages of docs/ that come from the code
	@$(BIN)/python -m tests.docs_gen docs

rendered: $(VENV)/.dev ## Generate k8s/rendered/ from the Helm chart; needs Go to build helm
	@$(BIN)/python -m tests.real.deployment.rendered

# -E reads every page, because a cached page does not repeat its warnings.
SITE ?= build/site
docs-site: $(VENV)/.dev ## Build the documentation site in build/site; warnings, such as broken links, are errors
	@$(BIN)/python -m sphinx -W --keep-going -E -q -j auto -c docs -d $(SITE).doctrees . $(SITE)
	@echo $(SITE)/index.html

lock: $(VENV)/.uv ## Update requirements/*.lock (newest allowed versions: LOCK_ARGS=--upgrade)
	@$(COMPILE) pyproject.toml --extra dev --output-file requirements/dev.lock
	@for extra in $(LOCKED_EXTRAS); do \
		$(COMPILE) pyproject.toml --extra $$extra --constraints requirements/dev.lock \
			--output-file requirements/$$extra.lock; done
	@$(COMPILE) requirements/bootstrap.in --constraints requirements/dev.lock \
		--output-file requirements/bootstrap.lock

SBOM_FOLDER ?= build/sbom
sbom: $(VENV)/.dev ## Write an SBOM for each image to build/sbom/ (CycloneDX JSON, from requirements/*.lock)
	@$(BIN)/python -m tests.sbom $(SBOM_FOLDER)

RELEASE ?= build/release
release: $(VENV)/.dev ## Write the wheel, the Helm chart, SBOMs and checksums to build/release/; publishes nothing (needs Go for helm)
	@rm -rf $(RELEASE)
	@$(BIN)/python -m tests.release $(RELEASE)

clean: ## Remove the environment, caches and build outputs
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

# A stamp file is newer than its lock file, so nothing is installed twice. All lock files have the versions of dev.lock
# (make lock constrains them), so that they can share one environment.
$(VENV)/.uv: requirements/bootstrap.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpuledger needs Python 3.11 or newer; set PYTHON: make PYTHON=python3.12")'
	@test -x $(BIN)/pip || { echo "making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

$(VENV)/.demo $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: requirements/%.lock pyproject.toml $(VENV)/.uv
	@echo "installing $<"
	@$(UV) pip install --require-hashes --requirement $<
	@$(UV) pip install --no-deps --no-build-isolation --editable .
	@touch $@

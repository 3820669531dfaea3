# The whole set-up: `make train` or `make test` on a fresh machine makes .venv itself and reuses it while it is current.
# `make train` and `make up` put into it what training needs, the other targets add what working on Cairn needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
TRAINER := $(VENV)/.trainer
DEVELOPER := $(VENV)/.developer
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

# python3 first, because that is what a person means by "Python"; then the newest one that is there.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$name -c '$(SUITABLE)' >/dev/null 2>&1; then echo $$name; break; fi; done)

.PHONY: help .venv train wheel test test-full test-slow test-mutants mutation test-matrix test-s3 test-slurm test-image image gpu-check gpu-wheels chaos chaos-ranks chaos-slurm bench bench-memory bench-data bench-loader bench-sql bench-ui bench-continuation bench-step bench-sum bench-checkpoint bench-store bench-start bench-overhead bench-history bench-install bench-time-to-loss bench-style check lock audit docs format pictures up clean

help:  ## show this list
	@grep -E '^[.a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([.a-z-]+):[^#]*## /\1\t/' | expand -t 14

.venv: $(DEVELOPER)  ## create the environment from constraints/, or do nothing when it is current

# No file is installed whose hash is not listed, and nothing is built but Cairn. Of torch there are several builds: it is
# downloaded first, because pip chooses another one when it checks hashes; the build for GPUs needs the libraries of cuda.txt.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
HASHED := --no-deps --only-binary :all: --require-hashes
NEEDS_CUDA := import sys; from importlib.metadata import requires; sys.exit("nvidia" not in str(requires("torch")))

# Built from nothing each time it is stale, and stamped last: an interrupted or outdated environment is never reused.
$(TRAINER): pyproject.toml $(wildcard constraints/*.txt)
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c '$(SUITABLE)' 2>/dev/null; then \
		echo "cairn needs Python 3.11 or newer with the venv module; '$(or $(PYTHON),python3)' is" \
			"$$("$(or $(PYTHON),python3)" --version 2>&1 | head -1 || true)." \
			"Install one and name it: make PYTHON=/path/to/python3.12 .venv" >&2; exit 1; fi
	@echo "making $(VENV) with $$("$(PYTHON)" --version) and constraints/run.txt (a minute or two, once)"
	@"$(PYTHON)" -m venv --clear $(VENV)
	@$(PIP) download --no-deps --only-binary :all: --dest $(VENV)/torch "$$(grep -o '^torch==[0-9.]*' constraints/torch.txt)"
	@$(PIP) install $(HASHED) --no-index --find-links $(VENV)/torch --requirement constraints/torch.txt
	@rm -r $(VENV)/torch
	@$(PIP) install $(HASHED) --requirement constraints/run.txt
	@if $(BIN)/python -c '$(NEEDS_CUDA)'; then $(PIP) install $(HASHED) --requirement constraints/cuda.txt; fi
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(DEVELOPER): $(TRAINER)
	@echo "adding constraints/develop.txt to $(VENV)"
	@$(PIP) install $(HASHED) --requirement constraints/develop.txt
	@touch $@

train: $(TRAINER)  ## train the quickstart on text every CPython carries; ARGS= adds options
	@$(BIN)/cairn train quickstart $(ARGS)

test: $(DEVELOPER)  ## the default test suite: offline, CPU
	@$(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder $(ARGS)

test-full: $(DEVELOPER)  ## all cases of the protocol and thousands of schedules, where `make test` tries a share
	@CAIRN_TEST_FULL=1 $(BIN)/python -m pytest -n 2 tests/protocol tests/storage/checkpoints/test_sweep.py \
		tests/storage/checkpoints/test_sweep_machine.py tests/storage/logs/test_fork_machine.py $(ARGS)

test-slow: $(DEVELOPER)  ## the crash and chaos suites as well
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not s3 and not gpu" $(ARGS)

test-mutants: $(DEVELOPER)  ## wrong wires, one at a time: each must turn a test of the default suite red; ARGS="-k back-off" tries some
	@$(BIN)/python -m pytest -n 2 -m slow tests/wiring/test_mutants.py $(ARGS)

mutation: $(DEVELOPER)  ## mutants drawn by a seed, each on the tests near it; ARGS="storage tasks/policy --seed 1 --count 40 --whole"
	@$(BIN)/python -m tests.programs.mutation.draw $(ARGS)

test-matrix: $(DEVELOPER)  ## a part of the suite in foreign environments: other Pythons, the oldest and the newest Prefect, nobody, spaces in the path, variables; ARGS="tests -n 3 --dist loadgroup" all of it
	@$(BIN)/python -m tests.matrix $(or $(ARGS),-n 3 --dist loadgroup --no-loadscope-reorder)

# As root on Debian the programs are installed; anybody else is told what to ask for.
CEPH := ceph-mon ceph-osd radosgw ceph-common
test-s3: $(DEVELOPER)  ## the storage tests on a real S3 server (Ceph), started and stopped by the tests
	@if ! type -P ceph-mon ceph-osd radosgw radosgw-admin ceph >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && type -P apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(CEPH); \
		else \
			echo "make test-s3 needs Ceph's programs. On Debian or Ubuntu:" \
				"sudo apt-get install --no-install-recommends $(CEPH)" >&2; exit 1; fi; fi
	@$(BIN)/python -m pytest -n 2 -m s3 $(ARGS)

SLURM := slurm-wlm munge
test-slurm: $(DEVELOPER)  ## the batch script for several machines on a real Slurm of two nodes, started and stopped by the tests (as root)
	@if ! type -P slurmctld slurmd munged sbatch >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && type -P apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(SLURM); \
		else \
			echo "make test-slurm needs Slurm and root. On Debian or Ubuntu:" \
				"sudo apt-get install --no-install-recommends $(SLURM)" >&2; exit 1; fi; fi
	@$(BIN)/python -m pytest -m slurm $(ARGS)

BUILDER ?= $(shell type -P docker podman buildah | head -n 1)
image:  ## build the trainer's image from the lock files, by docker, podman or buildah; ARGS="--build-arg PYTHON_IMAGE=…" has another base
	@if [ -z "$(BUILDER)" ]; then echo "make image needs docker, podman or buildah" >&2; exit 1; fi
	@$(BUILDER) build --file deployments/Containerfile --tag $(or $(TAG),cairn) $(ARGS) .

IMAGE := buildah mmdebstrap
test-image: $(DEVELOPER)  ## build the image without a daemon (as root, 15 minutes) and run it read-only, without a network; ARGS="--volume …" goes to the build
	@if ! type -P $(IMAGE) >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && type -P apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(IMAGE); \
		else \
			echo "make test-image needs root. On Debian or Ubuntu: sudo apt-get install --no-install-recommends $(IMAGE)" >&2; exit 1; fi; fi
	@CAIRN_TEST_IMAGE="build $(ARGS)" $(BIN)/python -m pytest -m slow tests/deployments/test_image.py

chaos: $(DEVELOPER)  ## kill real runs as seeds say and judge them; ARGS="--runs 20 --seed 7 --store local|s3|ceph --minutes 30 --jobs 2"; --segments replays every one; --add DIR… adds up
	@$(BIN)/python -m tests.programs.chaos.campaign $(ARGS)

chaos-ranks: $(DEVELOPER)  ## kill ranks of four at places of a step that seeds draw: no step lost, the same bits; ARGS="--runs 250 --seed 1 --minutes 25"
	@$(BIN)/python -m tests.programs.chaos.rank_campaign $(ARGS)

chaos-slurm: $(DEVELOPER)  ## runs on two machines of a real Slurm, disturbed as seeds say, a watcher beside them (as root); ARGS="--runs 50 --seed 1 --minutes 60"
	@$(BIN)/python -m tests.programs.chaos.slurm_campaign $(ARGS)

pictures: $(DEVELOPER)  ## the screenshots of docs/prefect.md, taken from Prefect's pages in a real Chromium
	@CAIRN_TEST_PICTURES=$(CURDIR)/docs/pictures $(BIN)/python -m pytest -n 0 -m slow tests/deployments/test_up_pages.py $(ARGS)

bench: bench-data bench-loader bench-step bench-sum bench-checkpoint bench-store bench-start bench-overhead bench-sql bench-history  ## every benchmark, beside its peers where they are at hand; BENCHMARKS.md says how to read them

bench-data: $(DEVELOPER)  ## text to snapshot beside the tokenizer library alone, and its peak memory; ARGS= adds options
	@PYTHONPATH=. $(BIN)/python tests/programs/benchmarks/bench_tokenize.py $(ARGS)

gpu-check: $(DEVELOPER)  ## all that only a GPU can show, in 40 minutes; ARGS="--nanogpt DIR", "--only b" (a part, under 10 minutes), "--device cpu --tiny" tries the program
	@$(BIN)/python -m tests.programs.gpu.check --output $(or $(OUTPUT),gpu-check) $(ARGS)

gpu-wheels: $(DEVELOPER)  ## what a machine with PyTorch and no network lacks for it, as wheels in .gpu/wheels
	@$(BIN)/python -m tests.programs.gpu.wheels --into .gpu/wheels $(ARGS)

bench-loader: $(DEVELOPER)  ## reading batches beside what training needs; ARGS= adds options
	@$(BIN)/python -m tests.programs.benchmarks.bench_loader $(ARGS)

bench-start: $(DEVELOPER)  ## cairn train to the first step beside a bare script's; ARGS="--before DIR" takes turns with another checkout
	@$(BIN)/python -m tests.programs.benchmarks.bench_start $(ARGS)

bench-overhead: $(DEVELOPER)  ## what of a run with segments of a minute is not training, beside the bare loop; ARGS="--observed": with page, exporters, webhook
	@$(BIN)/python -m tests.programs.benchmarks.bench_overhead $(ARGS)

bench-continuation: $(DEVELOPER)  ## a deployed run's receipt to its next claim, after SIGTERM and after SIGKILL; ARGS="--times 5"
	@$(BIN)/python -m tests.programs.benchmarks.bench_continuation $(ARGS)

bench-memory: $(DEVELOPER)  ## a trainer's estimated memory beside its measured peak, three sizes in every mode; ARGS="--only small" does less
	@$(BIN)/python -m tests.programs.benchmarks.bench_memory $(ARGS)

bench-sql: $(DEVELOPER)  ## SQL over 1,000 runs of 1,000 attempts beside DuckDB on plain Parquet (some minutes to make them); ARGS= adds options
	@PYTHONPATH=. $(BIN)/python tests/programs/benchmarks/bench_sql.py $(ARGS)

bench-ui: $(DEVELOPER)  ## the live page over 1,000 runs, and the plot of a million steps in a real Chromium; ARGS="--runs 100"
	@$(BIN)/python -m tests.programs.benchmarks.bench_ui $(ARGS)

bench-history: $(DEVELOPER)  ## a log of a million entries: folding it, caching it, opening it; ARGS="--all" keeps every entry as a file
	@$(BIN)/python -m tests.programs.benchmarks.bench_history $(ARGS)

bench-step: $(DEVELOPER)  ## the training step's modes against each other; ARGS="--nanogpt DIR" sets nanoGPT's beside them
	@PYTHONPATH=. $(BIN)/python -m tests.programs.benchmarks.bench_step $(ARGS)

bench-time-to-loss: $(DEVELOPER)  ## training time to nanoGPT's loss beside its own command; ARGS="--nanogpt DIR --text tinyshakespeare.txt"
	@$(BIN)/python -m tests.programs.benchmarks.bench_time_to_loss $(ARGS)

bench-style: $(DEVELOPER)  ## SmolLM2-135M learns a style with adapters and with all its weights; ARGS=FOLDER that tests/programs/benchmarks/gguf_weights.py made
	@$(BIN)/python -m tests.programs.benchmarks.bench_style $(ARGS)

bench-sum: $(DEVELOPER)  ## adding gradients along the tree beside adding them in turn, and two processes beside one; ARGS= adds options
	@$(BIN)/python -m tests.programs.benchmarks.bench_sum $(ARGS)

bench-checkpoint: $(DEVELOPER)  ## stall, time to committed and resume beside PyTorch's ways; ARGS="--parameters 124M --store s3://"
	@$(BIN)/python -m tests.programs.benchmarks.bench_checkpoint $(ARGS)

bench-store: $(DEVELOPER)  ## objects to and from a bucket beside bare requests; ARGS="--rounds 5 --objects 8"
	@$(BIN)/python -m tests.programs.benchmarks.bench_store $(ARGS)

# Of programs that run seldom: whether what they call is there, and takes what it is given.
NAMES_ALONE = --implicit-reexport --no-warn-unused-ignores $(addprefix --disable-error-code=,arg-type assignment \
	dict-item func-returns-value import-untyped misc no-any-return union-attr var-annotated)

check: $(DEVELOPER)  ## ruff, mypy --strict, import linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@rm -rf .tree && mkdir -p .tree/cairn
	@for part in $(wildcard cairn/*) flows model reports storage tasks; do ln -s "../../$$part" .tree/cairn/; done
	@$(BIN)/mypy
	@$(BIN)/mypy --cache-dir .mypy_cache/seldom -p tests.programs.gpu -p tests.programs.benchmarks -p tests.programs.mutation $(NAMES_ALONE)
	@cd .tree && "$(CURDIR)/$(BIN)/lint-imports" --config ../pyproject.toml

lock: $(DEVELOPER)  ## write constraints/ from pyproject.toml and constraints.txt, with the hashes of all files; needs uv
	@$(BIN)/python constraints/renew.py

audit: $(DEVELOPER)  ## known holes in the packages of constraints/; says whether it found some (Error 1) or could not ask (Error 3)
	@$(BIN)/python constraints/audit.py

docs: $(DEVELOPER)  ## write from the code: docs/reference/, and the rooms and the chain in docs/overview.md
	@PYTHONPATH=. $(BIN)/python -m docs.generate.reference_pages docs/reference
	@PYTHONPATH=. $(BIN)/python -m docs.generate.overview_page docs/overview.md

format: $(DEVELOPER)  ## let ruff put the code in shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

up: $(TRAINER)  ## Prefect server with UI on 127.0.0.1:4200, work pool, worker, deployments; Ctrl-C stops it; ALERT_BLOCK=, ACCELERATORS=
	@BIN=$(BIN) PORT=$(or $(PORT),4200) exec deployments/up.sh

wheel: $(TRAINER)  ## build dist/cairn_train-VERSION-py3-none-any.whl, for pipx, uv or pip
	@rm -rf build
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

bench-install: $(DEVELOPER)  ## download, size and time of installing the wheel, and what working on Cairn adds; ARGS= adds options
	@$(BIN)/python -m tests.programs.benchmarks.bench_install $(ARGS)

clean:  ## remove the environment and every cache; never a store
	rm -rf $(VENV) .tree build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find cairn deployments flows tasks model reports storage tests -name __pycache__ -type d -prune -exec rm -rf {} +

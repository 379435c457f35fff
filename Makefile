# make install       a virtual environment in .venv with everything below
# make compare       train a recurrent model, Mamba-2 and a transformer of the same size on real text, and compare them
# make test          all quick tests
# make test-kernels  every case of the NKI kernels, in the simulator
# make test-xla      training on torch-xla's CPU client, in an environment of its own that is kept in ~/.cache (7 GB)
# make torture       20 trainings killed at random instants that go on as if nothing had happened: 10 minutes
# make test-neuron   the kernels on a NeuronCore: against torch, and their latency into kernels/README.md
# make lint          style and types
# make papers        the claims of papers/ again, with fewer settings and one seed (PAPER=name: one of them)
# make papers-full   one of them whole, PAPER=name, as its results.csv was made
# make bench         speed and memory of ops and models beside other implementations, on one CPU thread
#
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes PyTorch's CPU wheel (200 MB) where PyPI has only CUDA builds.

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
NEURON_PYTHON := $(if $(VIRTUAL_ENV),python,$(BIN)/python)

.PHONY: install compare test test-kernels test-xla test-neuron torture lint bench papers papers-full clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints/cpu.txt constraints/demo.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r constraints/cpu.txt
	$(BIN)/pip install --quiet --no-deps --require-hashes -r constraints/demo.txt
	$(BIN)/pip install --quiet -c constraints/cpu.txt -e '.[demo,dev]'
	touch $@

compare: install
	$(BIN)/ssm-trn compare experiments/compare_quick.yaml

test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadscope -m "not slow and not gpu and not kernels and not neuron and not xla"

test-kernels: install
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m kernels tests/kernels tests/ops

test-xla: export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels
test-xla: export PJRT_DEVICE := CPU
test-xla: export SSM_TRN_NEURON := xla-cpu
test-xla: export OMP_NUM_THREADS := 1
test-xla:
	python=$$(TORCH_INDEX=$(TORCH_INDEX) tests/xla/environment.sh $(PYTHON)) && \
		$$python -m pytest -n 2 --dist loadscope -m xla tests/xla tests/neuron

torture: export OMP_NUM_THREADS := 1
torture: install
	$(BIN)/python -m tests.training.torture --kills 20

# In the environment that is active, as the Neuron SDK is nothing that `make install` installs.
test-neuron: export PYTHONPATH := kernels
test-neuron:
	$(NEURON_PYTHON) -m pytest -m neuron -rs tests/neuron
	test ! -e kernels/measured.csv || \
		$(NEURON_PYTHON) -m ssm_nki.cost --measured kernels/measured.csv --into kernels/README.md

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/ssm-trn bench ops
	$(BIN)/ssm-trn bench step
	$(BIN)/python -m ssm_trn.bench.generation_memory

PROCESSES ?= 2
PAPERS := $(if $(PAPER),$(PAPER),$(notdir $(patsubst %/run.py,%,$(wildcard papers/*/run.py))))

papers: install
	for name in $(PAPERS); do $(BIN)/python papers/$$name/run.py --reduced --processes $(PROCESSES) || exit 1; done

papers-full: install
	$(BIN)/python papers/$(or $(PAPER),$(error name one of papers/ with PAPER=name))/run.py --processes $(PROCESSES)

clean:
	rm -rf $(VENV) runs data build *.egg-info

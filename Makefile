# make test   everything that has to pass: ruff, mypy, pytest; up to five tests that fail are tried once more, alone
# make quick  the tests that take minutes: formats, states, plans, storage, two ranks
# make matrix the quick tests on the oldest torch and dependencies, then on the newest
# make demo   a job is killed in the middle of a save and resumes on another mesh
# make incidents   what went wrong elsewhere, played again, and with ckpt
# make site   the documentation as a site, in build/site
#
# They make .venv first if it is missing or older than pyproject.toml. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
# make matrix
PYTHON_OLDEST ?= $(PYTHON)
PYTHON_NEWEST ?= $(PYTHON)
# what the versions of torch and of dependencies decide, without servers, command lines and long waits
QUICK := tests/formats tests/golden tests/conformance tests/api tests/engine tests/io_backends tests/test_dtypes.py \
  tests/test_geometry.py tests/test_spans.py tests/test_tree.py tests/distributed/test_dtensors.py tests/distributed/test_round_trips.py
# most tests of several ranks wait for a deadline or for each other; more workers than cores wait at the same time
WORKERS ?= 6

.PHONY: venv demo test quick matrix oldest newest incidents dlio trainers coverage lint types format bench pictures site peers release-check clean s3-server machines
.DEFAULT_GOAL := test
.DELETE_ON_ERROR:

venv: $(STAMP)

$(STAMP): pyproject.toml constraints/dev.txt
	@if ! $(BIN)/python -c 'import pip' >/dev/null 2>&1; then \
	  command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON); install Python 3.10 or newer, or say PYTHON=/path/to/python" >&2; exit 1; }; \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "error: $$($(PYTHON) --version 2>&1) is too old: ckpt needs 3.10 or newer; say PYTHON=/path/to/python" >&2; exit 1; }; \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "error: $(PYTHON) cannot make virtual environments (no ensurepip); on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/dev.txt -e '.[dev]'
	@touch $@

test: lint s3-server machines
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --cache-clear $(PYTEST_ARGS)$(if $(filter-out --slow,$(PYTEST_ARGS)),, || \
	  { [ $$? = 1 ] && $(BIN)/python -m tests.again $(PYTEST_ARGS); })

quick: venv
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m 'not alone' $(QUICK) $(PYTEST_ARGS)

# 10 GB below .matrix, as pip's torch for Linux brings CUDA's libraries: make matrix PYTHON_OLDEST=python3.10 PYTHON_NEWEST=python3.13
matrix: oldest newest

oldest: .matrix/oldest/.installed s3-server
	.matrix/oldest/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m 'not alone' -p no:cacheprovider $(QUICK) $(PYTEST_ARGS)

newest: .matrix/newest/.installed s3-server
	.matrix/newest/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m 'not alone' -p no:cacheprovider $(QUICK) $(PYTEST_ARGS)

.matrix/oldest/.installed: pyproject.toml constraints/oldest.txt
	$(PYTHON_OLDEST) -m venv --clear .matrix/oldest
	.matrix/oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/oldest.txt -e '.[test]'
	@touch $@

.matrix/newest/.installed: pyproject.toml
	$(PYTHON_NEWEST) -m venv --clear .matrix/newest
	.matrix/newest/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

# the tests again, slower, with the lines and branches that they reach; the floor is in pyproject.toml
coverage: venv s3-server machines
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -q -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# a real object store for the tests, where apt and root are at hand; else they use moto's server and say so
s3-server:
	@tests/s3/install.sh

# what the tests on several machines need, where apt and root are at hand; else they are skipped
machines:
	@tests/machines/install.sh

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

# what pyright sees of the public names; 250 MB below .types, as pip's pyright brings Node.js
types: venv .types/bin/pyright
	$(BIN)/python -m pytest -q --slow tests/api/test_typed_use.py

.types/bin/pyright:
	$(PYTHON) -m venv --clear .types
	.types/bin/python -m pip install --quiet --disable-pip-version-check 'pyright[nodejs]==1.1.414'

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: venv
	$(BIN)/python examples/demo/run.py

# the drawing and the recording in the README; runs the demo
pictures: venv
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python docs/pictures/draw_steady.py
	$(BIN)/python docs/pictures/record_demo.py

# the documentation with search, in build/site; ends with 1 if a page, link or anchor is missing
site: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# tests of other projects on ckpt, fetched into .peers; takes half an hour. make peers PEERS_ARGS='dcp-storage --only fsdp'
peers: venv
	$(BIN)/python -m tests.peers $(PEERS_ARGS)

# public reports of lost or wrong checkpoints, played with the packages that they are about, then with ckpt: make incidents ARGS=deepspeed_8608
incidents: venv .incidents/.installed
	.incidents/bin/python examples/incidents $(ARGS)

# 650 MB beside what make venv installs, which is seen from there
.incidents/.installed: pyproject.toml examples/incidents/requirements.txt
	$(PYTHON) -m venv --clear .incidents
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(.incidents/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth
	echo "$(CURDIR)" >> $$(.incidents/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth
	$(BIN)/python -c 'import torch; print(f"torch=={torch.__version__}")' > .incidents/torch.txt
	.incidents/bin/python -m pip install --quiet --disable-pip-version-check -c .incidents/torch.txt -r examples/incidents/requirements.txt
	@touch $@

# DLIO's checkpoint workload with torch.save, DCP and ckpt, of a clone of github.com/argonne-lcf/dlio_benchmark: make dlio DLIO=/path/to/clone
dlio: venv .dlio/.installed
	@test -d "$(DLIO)/dlio_benchmark" || { echo "error: say DLIO=/path/to/a/clone of github.com/argonne-lcf/dlio_benchmark" >&2; exit 1; }
	PYTHONPATH=$(CURDIR):$(DLIO) .dlio/bin/python -m benchmarks.dlio $(ARGS)

.dlio/.installed: pyproject.toml
	$(PYTHON) -m venv --clear .dlio
	.dlio/bin/python -m pip install --quiet --disable-pip-version-check \
	  hydra-core==1.3.2 omegaconf pandas psutil h5py mpi4py mpich pydftracer pyyaml packaging pillow
	.dlio/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torch_checkpointing==0.1.1
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(.dlio/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth
	@touch $@

# jobs of other trainers on ckpt, in environments below .trainers: saved, killed, resumed. make trainers TRAINERS_ARGS='--only trl'
trainers: venv
	$(BIN)/python -m tests.trainers $(TRAINERS_ARGS)

# what would be published, in clean environments, one after another; 5 GB each, as for make matrix. make release-check RELEASE_ARGS='--python python3.10 --set oldest'
release-check: venv
	$(BIN)/python -m tests.release $(RELEASE_ARGS)

bench: venv
	$(BIN)/python -m benchmarks

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# `make` lists the targets. Each sets up what it needs in .venv first, unless told to use an
# interpreter that has everything already:  make test PYTHON=python3
#
#   PYTHON       an interpreter to use exactly as it is (none: .venv)
#   BOOTSTRAP    the Python that makes .venv (python3)
#   TORCH_BUILD  cpu or cuda: which build of torch .venv gets (cuda where nvidia-smi lists a GPU)
#   JOBS         processes that run the tests
#   ARGS         more arguments for pytest, the examples or the benchmarks
#   V=1          let pip say what it does

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test gpu-test lint bench docs clean

BOOTSTRAP ?= python3
ARGS ?=
VENV := .venv
comma := ,

ifneq ($(strip $(PYTHON)),)

# The named interpreter, as it is: nothing is installed, htile is imported from this folder.
PY := $(PYTHON)
JOBS ?= 1
READY :=
READY_BENCH :=
READY_DOCS :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

else

PY := $(VENV)/bin/python
JOBS ?= 2
ifeq ($(origin TORCH_BUILD),undefined)
TORCH_BUILD := $(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),cuda,cpu)
endif
# A stamp a build, so that a machine that gains a GPU gets the build for it.
READY := $(VENV)/.ready-$(TORCH_BUILD)
READY_BENCH := $(READY)-bench
READY_DOCS := $(READY)-docs

PIP := $(PY) -m pip --disable-pip-version-check --no-input $(if $(V),,-q)
INSTALL := $(PIP) install -c constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
EXTRAS := $(if $(filter cuda,$(TORCH_BUILD)),test$(comma)cu13,test)

endif

help:
	@echo 'make demo      run every example and check it; with no GPU through the reference'
	@echo 'make test      the tests that need no GPU'
	@echo 'make gpu-test  the tests that need an NVIDIA GPU'
	@echo 'make lint      ruff'
	@echo 'make bench     the benchmarks; which: ARGS="--suite throughput --seconds 120", ARGS=--help'
	@echo 'make docs      the documentation as a site, in site/; a dead link is an error'
	@echo 'make clean     remove .venv, caches and build outputs'
	@echo
	@echo 'The first one sets up .venv; PYTHON=python3 uses that interpreter as it is instead.'

demo: $(READY)
	$(PY) -m examples $(ARGS)

# One torch thread a process: the processes already fill the cores.
test: $(READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q -m "not gpu" \
	    $(if $(filter-out 0 1,$(JOBS)),-n $(JOBS) --dist worksteal) $(ARGS)

gpu-test: $(READY)
	$(PY) -m tests.gpu $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .

bench: $(READY_BENCH)
	$(PY) -m benchmarks $(ARGS)

docs: $(READY_DOCS)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)
	@echo 'site/index.html is the first page'

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis dump bench-out
	rm -f *.ptx *.cubin *.sass
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up --------------------------------------------------------------------------------------

# torch first, alone and by build, so that what follows finds it installed: on Linux a bare `torch`
# brings gigabytes of CUDA. `+cpu` is never the CUDA build, whatever the index offers, and `===` is
# never a CPU build. A machine whose pip knows a CPU wheel (a mirror, find-links) takes that one;
# others take it from PyTorch's own index. Outside Linux, PyPI's build is the CPU build.
define install-torch-cpu
if [ "$$(uname -s)" != Linux ]; then \
    $(PIP) install --no-deps torch==$(TORCH); \
elif ! $(PIP) install --no-deps torch==$(TORCH)+cpu 2>/dev/null; then \
    $(PIP) install --no-deps torch==$(TORCH)+cpu --index-url https://download.pytorch.org/whl/cpu || { \
        echo 'No CPU build of torch $(TORCH) is within reach. With one installed: PYTHON=python3' >&2; \
        exit 1; \
    }; \
fi
endef

install-torch-cuda = $(PIP) install --no-deps torch===$(TORCH)

$(VENV)/.ready-cpu $(VENV)/.ready-cuda: pyproject.toml constraints.txt
	@$(BOOTSTRAP) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "HTile needs Python 3.10 or newer; name one with BOOTSTRAP=")'
	@echo "setting up $(VENV): torch $(TORCH), $(TORCH_BUILD) build"
	@rm -f $(VENV)/.ready-*
	@$(BOOTSTRAP) -m venv $(VENV)
	@$(INSTALL) setuptools
	@$(install-torch-$(TORCH_BUILD))
	@$(INSTALL) --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.ready-cpu-bench: $(READY)
	@$(INSTALL) --no-build-isolation -e '.[bench]'
	@touch $@

$(VENV)/.ready-cpu-docs $(VENV)/.ready-cuda-docs: $(READY)
	@$(INSTALL) --no-build-isolation -e '.[docs]'
	@touch $@

# Without the peers the benchmarks run all the same, and say who is missing.
$(VENV)/.ready-cuda-bench: $(READY)
	@$(INSTALL) --no-build-isolation -e '.[bench]'
	@$(INSTALL) --no-build-isolation -e '.[bench,peers]' || echo 'quack and Liger are not installed' >&2
	@touch $@

# A fresh clone needs two of these: `make demo` shows it at work, `make test` tests it.
# Python >= 3.11 with venv, make and a C++ compiler must be there; the rest is installed, pinned, into .venv.

PYTHON ?= python3
VENV ?= .venv
# The torch that a new .venv gets. `TORCH=2.15.0 make demo` picks another, also over one that is there.
TORCH ?=
DEFAULT_TORCH := 2.13.0

# Markers are explained in pyproject.toml. `$(call pytest,MARKERS,OPTIONS)` runs what they select, and on a machine with a GPU the GPU tests.
WORKERS ?= 2
define pytest
$(BIN)/python -m pytest -m '$(1)' --numprocesses $(WORKERS) --dist worksteal $(2)
@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	set -x; $(BIN)/python -m pytest -m gpu; \
else echo 'no CUDA device: GPU tests left out'; fi
endef

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# What the makefile exports would change what a recipe's programs see, so nothing is exported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-all lint wheel torch check clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo      train and test a small model twice through PyGraph; the second run measures nothing'
	@echo 'make test      the tests, in a few minutes (with those for a GPU if there is a CUDA device)'
	@echo 'make test-all  these and the slow ones'
	@echo 'make lint      ruff, mypy, import-linter'
	@echo 'make wheel     build the wheel and try it in a bare environment'
	@echo 'make clean     remove everything these make'

demo: check torch
	@$(BIN)/python examples/demo.py

test: check torch $(STAMPS)/test
	$(call pytest,not slow and not team and not gpu)

test-all: check torch $(STAMPS)/test
	$(call pytest,not gpu,--durations 30)

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Through the sdist on purpose: a file that is missing there would be missing for everybody but us.
wheel: check torch $(STAMPS)/wheel
	rm -rf dist build
	$(BIN)/python -m build --quiet --no-isolation --outdir dist
	$(BIN)/check-wheel-contents dist/*.whl
	VENV='$(VENV)' tests/packaging/try_wheel.sh dist/*.whl

clean:
	rm -rf $(VENV) .demo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# --- installing --------------------------------------------------------------
# $(call need,shell test,what is wrong and what to do): one line and exit code 2 if the test fails.
need = $(if $(shell $(1) >/dev/null 2>&1 && echo yes),,$(error $(2)))

check:
	$(call need,$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11)',$(PYTHON) is not Python 3.11 or newer: install a newer one and name it: PYTHON=python3.12 make demo)
	$(call need,$(PYTHON) -c 'import ensurepip$(comma) venv',$(PYTHON) has no venv module: install it (Debian: apt-get install python3-venv))
	$(call need,command -v $(firstword $(CXX)),no C++ compiler ($(CXX)): torch.compile needs one; install it (Debian: apt-get install g++) or name it with CXX=)
	$(call need,test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h",Python's C headers are missing: install them (Debian: apt-get install python3-dev))
	@:

comma := ,

$(STAMPS)/venv: | check
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(@D) && touch $@

# Dependencies come from the pins alone, so pip need not resolve ours a second time.
$(STAMPS)/runtime: $(STAMPS)/venv requirements/runtime.txt pyproject.toml
	$(PIP) -r requirements/runtime.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMPS)/lint: requirements/test.txt
$(STAMPS)/test $(STAMPS)/lint $(STAMPS)/wheel: $(STAMPS)/%: $(STAMPS)/runtime requirements/%.txt
	$(PIP) -r requirements/$*.txt
	@touch $@

torch: $(STAMPS)/runtime
	@have=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null); \
	want='$(or $(TORCH),$(DEFAULT_TORCH))'; \
	case "$$have" in \
		"$$want" | "$$want"+*) ;; \
		?*) if [ -n '$(TORCH)' ]; then install=yes; fi ;; \
		*) install=yes ;; \
	esac; \
	if [ -n "$$install" ]; then \
		echo "installing torch $$want"; \
		$(PIP) --constraint requirements/torch.txt "torch==$$want"; \
	fi

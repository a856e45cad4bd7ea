# On a machine with Python 3.11 to 3.14, pip and make, each target sets up what it needs.

PYTHON ?= python3
TORCH ?= 2.11
CHROMIUM ?= chromium
ARGS ?=
RUN ?=
OUT ?= runs/benchmark_gpu
PART ?= 1
WHEELS ?=

# The sets of packages, by the torch in them, each in an environment of its own. A file holds every
# package of its set with its version (`make lock`).
ifeq ($(TORCH),2.11)
  VENV ?= .venv
  PACKAGES := requirements.txt
  TESTS := --no-deps -r requirements-dev.txt
else ifeq ($(TORCH),2.7)
  VENV ?= .venv-torch-2.7
  PACKAGES := requirements-torch-2.7.txt
  # What the tests need is not pinned beside this set.
  TESTS := -r pyproject.toml --extra ray --group test -c $(PACKAGES)
else
  $(error no packages are pinned for this torch: got '$(TORCH)'; allowed: 2.11 (code for GPUs from sm_75 \
    to sm_120), 2.7 (sm_50 to sm_90, the versions that Composer asks for); change it with TORCH)
endif

# What installs the packages; pip installs it, and nothing else.
UV := uv==0.13.9
# Named after what they installed, so that any change of these files installs again.
STAMP := $(VENV)/.installed-$(shell cat $(PACKAGES) | cksum | cut -d ' ' -f 1)
DEV_STAMP := $(STAMP)-dev-$(shell cat requirements-dev.txt pyproject.toml | cksum | cut -d ' ' -f 1)
SITE := $(abspath $(OUT))/site-packages
WITH_WHEELS := $(if $(WHEELS),PYTHONPATH=$(SITE):$$PYTHONPATH)
# There while pip and uv work. Found at the start, it means that an installation was cut off, which
# neither notices: they take a package with its metadata for a whole one.
INSTALLING := $(VENV)/.installing

# uv compiles no bytecode. To compile all 35,900 files took 69 s of processor time more; to import
# torch, diffusers, transformers and composer compiles 4,700 of them, 9 s, once, if Python may write:
unexport PYTHONDONTWRITEBYTECODE

define make_environment
	@if [ -e $(INSTALLING) ] || ! $(VENV)/bin/python -m pip --version > /dev/null 2>&1; then \
	  if ! $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then \
	    command -v uv > /dev/null || { echo "Python 3.11 to 3.14 is needed and '$(PYTHON)' is not:" \
	      "make PYTHON=python3.12 ..., or install uv, which then fetches one." >&2; exit 2; }; \
	    uv venv --seed --clear --python '>=3.11,<3.15' $(VENV); \
	  else \
	    $(PYTHON) -c 'import ensurepip, venv' || { \
	      echo "'$(PYTHON)' cannot make a virtual environment: install its venv and ensurepip" \
	        "modules (Debian, Ubuntu: apt install python3-venv)." >&2; exit 2; }; \
	    echo "Making the virtual environment $(VENV)"; $(PYTHON) -m venv --clear $(VENV); \
	  fi; fi
endef

define install
	@rm -f $(VENV)/.installed-* && touch $(INSTALLING)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(UV)
	$(VENV)/bin/python tools/uv_pip.py install $(1)
	@rm $(INSTALLING)
endef

# $(call compile,FILE,FLAGS): resolve pyproject.toml into the file, whose versions stay where they can.
compile = $(VENV)/bin/python tools/uv_pip.py compile -q pyproject.toml --universal \
  --annotation-style line --custom-compile-command "make lock" -o $(1) $(2)

define install_wheels
	@if [ -n "$(WHEELS)" ]; then $(PYTHON) -m pip install -q --no-index --no-deps --no-compile \
	  --upgrade --target $(SITE) $(WHEELS)/*.whl; fi
endef

.DEFAULT_GOAL := help
.PHONY: help lock wheels benchmark benchmark-gpu rehearse-gpu test test-ray test-cluster lint publish needs-run results settings clean

help: ## Print this list
	@echo "usage: make TARGET [PYTHON=python3] [TORCH=2.11|2.7] [VENV=.venv]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' Makefile

benchmark: $(STAMP) ## Measure sd2-base on this machine; more flags in ARGS="..."
	$(VENV)/bin/composer benchmark.py --use_synth_data $(ARGS)

# Not in the virtual environment: a GPU host may have torch and composer and reach no registry. There
# WHEELS names a folder of the packages that it lacks.
benchmark-gpu: ## Measure one GPU, PART=1, 2, 3 or 4 of 10 minutes each; [WHEELS=dir] [OUT=dir]
	$(install_wheels)
	@$(WITH_WHEELS) $(PYTHON) -c 'import sys, composer, torch; sys.exit(not torch.cuda.is_available())' || { \
	  echo "A GPU, torch and composer are needed, and '$(PYTHON)' finds not all of them: set" \
	    "PYTHON=python3.12 or WHEELS=dir." >&2; exit 2; }
	$(WITH_WHEELS) $(PYTHON) -m sdbench sweep sweeps/benchmark_gpu_$(PART).yaml \
	  --folder $(OUT)/part_$(PART) $(ARGS)

rehearse-gpu: ## Make the runs of benchmark-gpu in miniature on a CPU, by the same PYTHON and WHEELS
	$(install_wheels)
	@mkdir -p $(OUT)
	$(WITH_WHEELS) $(PYTHON) tools/gpu_stand_in.py sweeps/benchmark_gpu_$(PART).yaml \
	  > $(OUT)/rehearsal_$(PART).yaml
	CUDA_VISIBLE_DEVICES= $(WITH_WHEELS) $(PYTHON) -m sdbench sweep $(OUT)/rehearsal_$(PART).yaml \
	  --folder $(OUT)/rehearsal_$(PART) $(ARGS)

# As many processes as tests/conftest.py says; a file's tests stay together and in order. A process that
# crashes ends the tests: pytest-xdist 3.8 would start another, and may then wait for ever.
test: $(DEV_STAMP) ## Run the tests that need no GPU; other pytest options in ARGS="..."
	$(VENV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	  --durations 10 $(ARGS)

test-cluster: $(DEV_STAMP) ## Run the tests that install Slurm and etcd and make networks: root on Debian
	$(VENV)/bin/python -m pytest -m system $(ARGS)

# In one process: a Ray cluster of two workers keeps two cores busy.
test-ray: $(DEV_STAMP) ## Run the tests of the engine ray, which start clusters on this machine
	$(VENV)/bin/python -m pytest -m "ray and not full" --durations 10 $(ARGS)


lint: $(DEV_STAMP) ## Check style with ruff, and who imports whom
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/lint-imports

publish: $(if $(RUN),$(STAMP),needs-run) ## Copy a run into results/: make publish RUN=runs/...
	$(VENV)/bin/python -m sdbench publish $(RUN)

needs-run:
	@echo "Say which run: make publish RUN=runs/<run>" >&2; exit 2

results: $(STAMP) ## Make the tables, plots and pages in results/ again, and README.md's picture; CHROMIUM=chromium
	$(VENV)/bin/python -m sdbench report
	$(VENV)/bin/python tools/picture_page.py $(CHROMIUM)

settings: $(STAMP) ## Make docs/settings.md again from the declarations of the settings
	$(VENV)/bin/python -m sdbench.settings.page > docs/settings.md.new
	mv docs/settings.md.new docs/settings.md

lock: $(DEV_STAMP) ## Resolve pyproject.toml into requirements*.txt; to newest versions by ARGS=--upgrade
	$(call compile,requirements-dev.txt,--overrides overrides.txt --all-extras --group dev $(ARGS))
	cp requirements-dev.txt requirements-all.txt
	$(call compile,requirements-all.txt,--overrides overrides.txt --all-extras)
	cp requirements-dev.txt requirements.txt
	$(call compile,requirements.txt,--overrides overrides.txt)
	$(call compile,requirements-torch-2.7.txt,$(ARGS))

# Of x86-64 and Python 3.12. pip takes each tag alone.
wheels: ## Download what a GPU host with torch 2.11 and no registry lacks into WHEELS=build/wheels
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
	  $(foreach tag,2_28 2_27 2_17 2_14 2_12 2_5 2014 1,--platform manylinux$(if $(findstring _,$(tag)),_)$(tag)_x86_64) \
	  -d $(or $(WHEELS),build/wheels) -c requirements.txt -r single-node/gpu-host-lacks.txt

clean: ## Remove the virtual environment and caches; runs/ and results/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP):
	$(make_environment)
	@echo "Installing $(PACKAGES): 5.9 GB on disk"
	$(call install,--no-deps -r $(PACKAGES))
	@touch $@

$(DEV_STAMP):
	$(make_environment)
	@echo "Installing what tests need: 6.8 GB on disk"
	$(call install,$(TESTS))
	@touch $(STAMP) $@

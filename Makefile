# The first use of any command creates .venv with PYTHON (make setup PYTHON=python3.12); delete .venv to choose another.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

# Nothing phones home and nothing is fetched at run time.
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE := 1

.PHONY: help setup demo test check benchmark-trl
help:
	@echo "make setup   create .venv with the pinned packages (the other three do it on first use)"
	@echo "make demo    train a tiny model with GRPO: held-out accuracy before and after"
	@echo "make test    the whole test suite, real engines included"
	@echo "make check   ruff, types and the unit tests"
	@echo "make benchmark-trl   one GRPO step against TRL's on this machine (installs TRL beside .venv)"

setup: $(READY)

$(READY): requirements.txt setup.py scripts/install.py
	@command -v $(PYTHON) >/dev/null || { echo "setup: no '$(PYTHON)' found. Install Python 3.11 to 3.14, or name it: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) scripts/install.py
	@touch $@

demo: $(READY)
	@$(RUN) -m recipes.demo

test: $(READY)
	@$(RUN) -m pytest

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest tests/unit

TRL := .venv-trl

# An environment of its own for the library that is compared with, on top of the same torch and transformers.
$(TRL)/.ready: $(READY)
	@$(RUN) -m venv $(TRL)
	@$(RUN) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $(TRL)/lib/python3*/site-packages)/base.pth
	@$(TRL)/bin/python -m pip install --quiet --no-deps trl==1.16.0
	@touch $@

# For instance: make benchmark-trl OPTIONS="model=demo lengths=mixed"
benchmark-trl: $(TRL)/.ready
	@$(RUN) -m benchmarks.versus_trl $(OPTIONS)

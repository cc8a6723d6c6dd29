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

.PHONY: help setup demo test check
help:
	@echo "make setup   create .venv with the pinned packages (the other three do it on first use)"
	@echo "make demo    train a tiny model with GRPO: held-out accuracy before and after"
	@echo "make test    the whole test suite, real engines included"
	@echo "make check   ruff, types and the unit tests"

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

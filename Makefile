# make demo    the main job: a swarm on this machine, one syncer killed on the way   (ARGS="--seconds 60")
# make quick   tests that open no socket and start no process (three minutes)
# make test    everything that CI runs
# make slow    what takes long: many seeds, every architecture of transformers, given models between real nodes
# make check   format, lint, types, architecture
# make docs    the documents as a site, in build/site (open index.html there)
# make release source archive and wheel of the last commit, checked and tried, in dist/
# Each does all set-up it needs in .venv, once; with PYTHON=python3.12, say, in an environment of that Python's own.

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
STAMP := $(VENV)/.installed
QUICK := $(addprefix tests/,core tensors config credits web cli daemon tasks learner adapters lab)
# Plots are drawn without a display.
export MPLBACKEND := Agg
# Empty is "no": where Python may not keep what it compiled, each of a swarm's processes compiles the package.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo quick test slow check docs release clean
help:
	@sed -n '/^$$/q; s/^# //p' Makefile

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt scripts/setup
	@scripts/setup $(VENV)
	@touch $@

demo: $(STAMP)
	@$(VENV)/bin/p2pdiloco demo $(ARGS)

check: $(STAMP)
	@scripts/check $(VENV)

test: $(STAMP)
	@scripts/test $(VENV) $(ARGS)

quick: $(STAMP)
	@nice -n 5 $(VENV)/bin/python -m pytest -q -n 2 --tier quick $(ARGS) $(QUICK)

slow: $(STAMP)
	@nice -n 5 $(VENV)/bin/python -m pytest -q -n 2 --tier slow $(ARGS) tests

docs: $(STAMP)
	@$(VENV)/bin/python -m sphinx -q -E -W --keep-going -c docs . build/site

release:
	@scripts/release

clean:
	rm -rf $(VENV) build dist p2pdiloco.egg-info lab/build lab/p2pdiloco_lab.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find p2pdiloco lab tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

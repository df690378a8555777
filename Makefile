# Common commands. Each sets up .venv first if needed.
setup := source strategies/setup_env.sh requirements.txt tests/requirements.txt
SHELL := bash
.PHONY: help setup test quick ends lint docs report

help:  ## List these
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup:  ## Environment, this package in it, and the pre-commit hooks
	$(setup) && python -m pip install --no-deps --editable . && pre-commit install

test:  ## Every check and every test that needs no GPU
	bash tests/run.sh

quick:  ## Unit tests of every room, without processes
	bash tests/run.sh -q -n 2 tests/settings tests/models tests/data tests/plan tests/predict tests/planner tests/records tests/test_*.py

ends:  ## The unit tests with the oldest and the newest versions in the ranges
	$(setup) && for end in oldest newest; do python -m tests.ends $$end || exit; done

lint:  ## ruff, mypy, import-linter and codespell on all files
	$(setup) && pre-commit run --all-files

docs:  ## Rewrite the generated parts of the documents
	$(setup) && python results/lab/documents.py

report:  ## Table and plots of your runs, in report/
	$(setup) && python real_model_example.py report

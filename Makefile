# Common commands. Each sets up .venv first if needed.
setup := source strategies/setup_env.sh requirements.txt tests/requirements.txt
rooms := $(addprefix tests/,settings models data plan predict planner records)
SHELL := bash
.PHONY: help setup test quick ends lint docs sizes report page dist

help:  ## List these
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup:  ## Environment, this package in it, and the pre-commit hooks
	$(setup) && python -m pip install --no-deps --editable . && pre-commit install

test:  ## Every check and every test that needs no GPU
	bash tests/run.sh

quick:  ## Unit tests of every room, without processes
	bash tests/run.sh -q -n 2 -m "not processes" $(rooms) tests/test_*.py

ends:  ## Unit tests and layouts with the oldest and with the newest versions in pyproject.toml's ranges
	$(setup) && python -m pip install -q uv && for end in lowest-direct highest; do \
	  uv venv -q --allow-existing .venv/$$end && \
	  uv pip install -q --python .venv/$$end --resolution $$end -e '.[train,dev]' && \
	  source .venv/$$end/bin/activate && \
	  python -m pytest -q -n 2 $(rooms) tests/parallel tests/parity/test_layouts.py tests/parity/test_lora.py || exit; done

lint:  ## ruff, mypy, import-linter and codespell on all files
	$(setup) && pre-commit run --all-files

docs:  ## Rewrite the generated parts of the documents
	$(setup) && python results/lab/documents.py

sizes:  ## Code tokens of each folder
	$(setup) && python results/lab/sizes.py

report:  ## Table of your runs
	$(setup) && python real_model_example.py report

page:  ## The planner as a web page, in build/page/
	bash results/lab/planner_page/build.sh build/page

dist:  ## The wheel and the source package of a release, in build/dist/
	python3 -m venv build/dist-env && build/dist-env/bin/python -m pip install -q build && \
	  build/dist-env/bin/python -m build --outdir build/dist .

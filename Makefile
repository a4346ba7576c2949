# `make demo` and `make test` do all the set-up by themselves; everything lands in .venv and bundles/.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= The history of the printing press begins
MODEL ?= gemma3_270m
# What bench-peers measures of ours: MODEL=BUNDLE, several of a model if wanted.
BUNDLES ?= gemma3_270m=bundles/gemma3_270m gemma3_270m=bundles/gemma3_270m_balanced smollm2_135m=bundles/smollm2_135m

.DELETE_ON_ERROR:
.PHONY: demo test lint real apple peers bench-peers quality scaling results clean

# The environment is rebuilt when a pin changes.
$(VENV)/.installed: pyproject.toml requirements/constraints.txt requirements/models.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements/models.txt
	touch $@

# What the export took goes to a file beside the bundle, for bench-peers.
bundles/%/manifest.json: configs/%.yaml $(VENV)/.installed
	$(BIN)/python bench/peers/cost.py bundles/$*.cost.json $(BIN)/python -m exporter export --model $< --out bundles/$*

# Export the model and let the exported program continue a prompt.
demo: bundles/$(MODEL)/manifest.json
	$(BIN)/python -m runtime_ref generate --bundle bundles/$(MODEL) --prompt "$(PROMPT)"

# Everything CI runs: style, types, and the tests on tiny random models.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy exporter runtime_ref bench

# The benches below write JSON into docs/results and the page docs/results.md from all of it.

# Both real models, float and quantised. About an hour.
real: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow -s
	$(BIN)/python bench/real_models.py
	$(BIN)/python bench/results.py

# Gemma 3 270M in Apple's formats, run here. About two hours.
apple: $(VENV)/.installed
	$(BIN)/python bench/apple_models.py
	$(BIN)/python bench/results.py

# Every peer of bench-peers in an environment of its own under .peers, and its converted models. About an hour, once.
peers: $(VENV)/.installed
	$(BIN)/python bench/peers/install.py

# Our bundles and the peers by turns. About 45 minutes on a machine that does nothing else.
bench-peers: $(foreach bundle,$(BUNDLES),$(lastword $(subst =, ,$(bundle)))/manifest.json) $(VENV)/.installed
	$(BIN)/python bench/bench_peers.py $(addprefix --bundle ,$(BUNDLES))
	$(BIN)/python bench/results.py

# Bundles beside float32 on fourteen kinds of text. About ten minutes.
quality: $(foreach bundle,$(BUNDLES),$(lastword $(subst =, ,$(bundle)))/manifest.json) $(VENV)/.installed
	$(BIN)/python bench/quality.py $(addprefix --bundle ,$(BUNDLES))
	$(BIN)/python bench/results.py

# What exports of random models of several sizes cost. About 20 minutes.
scaling: $(VENV)/.installed
	$(BIN)/python bench/export_scaling.py
	$(BIN)/python bench/results.py

# The page from the JSON alone; nothing is measured.
results: $(VENV)/.installed
	$(BIN)/python bench/results.py

clean:
	rm -rf $(VENV) bundles

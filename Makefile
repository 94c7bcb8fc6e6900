# Every target makes the environment that it needs, once: `make demo` and `make test` are all there is
# to setting up. PYTHON may name another Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two workers for two cores, one thread each; timings are never taken in tests.
WORKERS ?= 2

.PHONY: demo test lint format bench docs pictures sanitize release clean

$(VENV)/core: pyproject.toml models/pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing jacobiflow into $(VENV) (once)"
	@$(PIP) torch
	@$(PIP) -e . -e ./models
	@touch $@

$(VENV)/dev: $(VENV)/core lab/pyproject.toml
	@echo "installing what tests and checks need into $(VENV) (once)"
	@$(PIP) -e '.[dev,hub,data,peers,tensorboard,docs]' -e './lab[eval,baselines,app]'
	@touch $@

demo: $(VENV)/core
	@$(BIN)/jacobiflow bench mnist --batch 1 16 --labels 0-9 --plan selective auto --repeats 20 --seconds 40 --force --out out
	@echo "look at out/bench.png, then try:"
	@echo "  $(BIN)/jacobiflow sample mnist -n 60 --labels 0-9 --guidance 1 --denoise --out samples"
	@echo "  $(BIN)/jacobiflow sample mnist-maf -n 100 --out vectors"
	@echo "  $(BIN)/jacobiflow --help"

test: $(VENV)/dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(VENV)/dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

format: $(VENV)/dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/dev
	@$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "open site/index.html"

# Pictures of the guide: frames of a solve, the import graph. README's is out/bench.png of `make demo`.
pictures: $(VENV)/dev
	@$(BIN)/python docs/tools/frames.py
	@$(BIN)/python docs/tools/graph.py

# The C kernels under AddressSanitizer (with UndefinedBehaviorSanitizer) and ThreadSanitizer, over the shapes of the
# laws. torch itself is not instrumented: what it leaks or races on its own is left out.
sanitize: $(VENV)/dev
	@for kind in address,undefined thread; do \
	  library=$$(cc -print-file-name=lib$$(echo $$kind | cut -c1)san.so); \
	  echo "$$kind"; \
	  JACOBIFLOW_CACHE=$$(mktemp -d) CC="cc -g -fsanitize=$$kind" LD_PRELOAD=$$library PYTHONPATH=tests \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66 \
	    setarch -R $(BIN)/python tests/sanitize.py || exit 1; \
	done

# Builds the three distributions, checks them and tries them in a fresh environment.
release: $(VENV)/dev
	@$(BIN)/python docs/tools/release.py

clean:
	rm -rf $(VENV) out site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

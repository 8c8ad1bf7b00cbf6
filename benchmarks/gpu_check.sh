#!/usr/bin/env bash
# One CUDA machine, under six minutes: results against the CPU first (tiny model, all dtypes, graphs on and off, int8 and
# int4), then the tables of the 7b shape. Usage: benchmarks/gpu_check.sh | tee benchmarks/results/$(date +%F)-NAME.txt
set -euo pipefail
cd "$(dirname "$0")/.."
python benchmarks/gpu_check.py --device "${DEVICE:-cuda}"
bench() { python -m llama bench --device "${DEVICE:-cuda}" --shape "${SHAPE:-7b}" --trials 3 "$@"; }
bench --batches 1,64 --prompt 128 --tokens 64 --compile
bench --batches 1 --prompt 2048 --tokens 16
bench --batches 1 --prompt 128 --tokens 64 --compile --quantize int8
bench --batches 1 --prompt 128 --tokens 64 --compile --quantize int4

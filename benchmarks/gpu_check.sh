#!/usr/bin/env bash
# One page about a CUDA machine: results against the CPU first (tiny model, all dtypes, graphs on
# and off, int8 and int4), then the 7b shape at 1 and 16 rows with its shares of the copy bandwidth and of the matrix rate,
# both measured in the same run, prefill of 2,048 tokens, int8, int4, and as many GPUs of 1, 2, 4, 8 as there are.
# Usage: benchmarks/gpu_check.sh | tee benchmarks/results/$(date +%F)-NAME.txt
# Without a GPU: PYTHON="python tests/simcuda.py" SHAPE=15m QUICK=1 benchmarks/gpu_check.sh (pretend: times mean nothing)
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra PYTHON <<< "${PYTHON:-python}"
DEVICE=${DEVICE:-cuda} SHAPE=${SHAPE:-7b}
"${PYTHON[@]}" benchmarks/gpu_check.py --device "$DEVICE"
table() { grep -v '^{' || true; }  # for people: not the line of JSON that ends each run
if [ -n "${QUICK:-}" ]; then short="--prompt 8 --tokens 3 --trials 1"; else short=""; fi
bench() { "${PYTHON[@]}" -m llama bench --device "$DEVICE" --shape "$SHAPE" --trials 3 --tokens 64 "$@" $short | table; }
bench --batches 1,16 --prompt 128 --compile
bench --batches 1 --prompt 2048
bench --batches 1,16 --prompt 128 --compile --quantize int8
bench --batches 1,16 --prompt 128 --compile --quantize int4
GPUS=${GPUS:-$("${PYTHON[@]}" -c 'import torch; print(torch.cuda.device_count())')}
for ranks in 2 4 8; do
  [ "$ranks" -le "$GPUS" ] || break
  torchrun --standalone --nproc_per_node "$ranks" --no-python "${PYTHON[@]}" -m llama bench --device cuda --shape "$SHAPE" \
    --batches 1,16 --prompt 128 --tokens 64 --compile $short | table
done

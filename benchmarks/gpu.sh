#!/usr/bin/env bash
# On a machine with a GPU, with the torch that is there and no network: builds in place, holds every op on CUDA
# against its oracle, looks for bad accesses and races where compute-sanitizer is, and measures.
#   [PYTHON=python3] bash benchmarks/gpu.sh FOLDER
# FOLDER gets build.txt, tests.txt, memcheck.txt, racecheck.txt, ops.txt and ops.json. Nothing stops at the first
# failure; the exit status is that of the last one.
set -euo pipefail
folder=$(mkdir -p "${1:?which folder}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
status=0

$python -c 'import torch; assert torch.cuda.is_available(), "no GPU"; print(torch.cuda.get_device_name())'
$python setup.py build_ext --inplace 2>&1 | tee "$folder/build.txt"
tests=(tests/test_every_op.py tests/test_package.py tests/test_benchmarks.py)
for op in specvis_kernels/[a-z]*.py; do tests+=("tests/test_$(basename "$op")"); done
$python -m pytest -q --benchmark-disable "${tests[@]}" 2>&1 | tee "$folder/tests.txt" || status=$?
for tool in memcheck racecheck; do
    if command -v compute-sanitizer >/dev/null; then
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 3 \
            "$python" -m pytest -q tests/test_every_op.py -k "(equals_its_oracle or bad_row) and triton" \
            2>&1 | tee "$folder/$tool.txt" || status=$?
    else
        echo "compute-sanitizer: not available" | tee "$folder/$tool.txt"
    fi
done
$python -m benchmarks.ops --json "$folder/ops.json" 2>&1 | tee "$folder/ops.txt" || status=$?
exit $status

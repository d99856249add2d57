#!/usr/bin/env bash
# On a machine with a GPU, with the torch that is there and no network: builds in place, holds every op on CUDA
# against its oracle, looks for bad accesses, races and uninitialized reads, and measures.
#   make gpu        or [PYTHON=python3] [OUT=out] bash benchmarks/gpu.sh
# OUT gets a text file per part and a copy of benchmarks/results/<gpu>.json. Each part has a time limit (8 minutes
# in all), nothing stops at the first failure, and the exit status is that of the last one.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 SPECVIS_CUDA=1
status=0

part() {  # name, seconds, command
    echo "== $1"
    timeout "$2" "${@:3}" 2>&1 | tee "$folder/$1.txt" || status=$?
}

gpu='import torch; assert torch.cuda.is_available(), "no GPU"; print("%d.%d" % torch.cuda.get_device_capability())'
TORCH_CUDA_ARCH_LIST=$($python -c "$gpu") || exit 1
export TORCH_CUDA_ARCH_LIST

ops=(tests/kernels/test_every_op.py)
for op in specvis_kernels/[a-z]*.py; do ops+=("tests/kernels/test_$(basename "$op")"); done
others=()
for file in tests/test_*.py tests/*/test_*.py; do [[ " ${ops[*]} " == *" $file "* ]] || others+=("$file"); done

part build 100 "$python" setup.py build_ext --inplace
part tests 120 "$python" -m pytest -q --benchmark-disable "${ops[@]}"
for tool in memcheck racecheck initcheck synccheck; do
    if command -v compute-sanitizer >/dev/null; then
        part $tool 20 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 3 \
            "$python" -m pytest -q tests/kernels/test_every_op.py -k "(equals_its_oracle or bad_row) and (triton or cuda)"
    else
        part $tool 1 echo "compute-sanitizer: not available"
    fi
done
part ops 120 "$python" -m benchmarks.ops --seconds 0.1 --json
sed -n "s/^wrote //p" "$folder/ops.txt" | xargs -r cp -t "$folder"
part program 60 "$python" -m pytest -q --benchmark-disable -m "not slow" "${others[@]}"
exit $status

#!/usr/bin/env bash
# For a machine with a GPU, with its own torch, the packages of python/pyproject.toml and no network: builds for that
# GPU, compares every op on CUDA with the C++ kernel and the oracle, measures ops and decoding, and looks for bad
# accesses, races and uninitialized reads.
#   make gpu          or [PYTHON=python3] [OUT=out] [BEFORE=out] [LIMIT=seconds] bash benchmarks/gpu.sh [PART...]
#   make gpu DRY=1    without a GPU: each part as far as that goes, on the CPU, into out/dry; minutes the first time
# The most useful parts come first; each has a time limit, 32 minutes in all after `build`. A part that fails does not
# stop the next, but for `build`, and `smoke` where an op is wrong. The exit status says whether any failed. OUT gets
#   log.txt          the output of the parts, line by line
#   summary.txt      a table: part, seconds, status
#   ops.json         times, written after each row; a part that is run again goes on where it ends
#   families.json    times of models of transformers, decode.json of LlamaGen's
#   ncu-OP.ncu-rep   counters of three kernels
#   built-GPU-SOURCES.tar, the libraries
# ops.json and the libraries are copied from BEFORE, an earlier OUT: its rows are not timed again, and its libraries not
# built again. They can be built before, on any machine of this kind of processor that has torch and nvcc:
#   TORCH_CUDA_ARCH_LIST=9.0 OUT=folder bash benchmarks/gpu.sh build      9.0: the GPU's compute capability
# Then BEFORE=folder on the machine with the GPU. Where `build` is left out although it is needed, it comes first.
# Parts for four stays of ten minutes, with LIMIT=580:
#   smoke ops tests graphs loops
#   families memcheck racecheck
#   decode ncu-draft_frontier ncu-verify_logits ncu-tree_attention baselines
#   triton initcheck synccheck others
set -uo pipefail
cd "$(dirname "$0")/.."
[[ ${DRY:-} != 0 ]] || DRY=
out=${OUT:-out${DRY:+/dry}}
folder=$(mkdir -p "$out" && cd "$out" && [[ -w . ]] && pwd) || { echo "OUT=$out is no folder to write to"; exit 2; }
[[ ${LIMIT:-1} =~ ^[1-9][0-9]*$ ]] || { echo "LIMIT must be seconds, got $LIMIT"; exit 2; }
before=${BEFORE:-out}
[[ ! ${BEFORE:-} || -d $before ]] || { echo "BEFORE=$before is no folder"; exit 2; }
python=${PYTHON:-python3}
dry=${DRY:+tree_links}  # in a dry run, the op that stands for all
export PYTHONUNBUFFERED=1 SPECVIS_CUDA=1 PYTHONPATH="$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
for tools in ${CUDA_HOME:+"$CUDA_HOME/bin" "$CUDA_HOME/compute-sanitizer"} /usr/local/cuda/bin /usr/local/cuda/compute-sanitizer /opt/nvidia/nsight-compute/*; do PATH+=:$tools; done
status=0 table="" wanted="" names=()

say() { echo "$*" | tee -a "$folder/log.txt"; }

summary() {  # with a part that is not at its end yet, or without
    printf 'part                   seconds  status\n%s%s' "$table" "${1:-}" > "$folder/summary.txt.new"
    mv "$folder/summary.txt.new" "$folder/summary.txt"
}

end() {  # name, seconds, status
    table+=$(printf '%-20s %9d  %s' "$@")$'\n'
    summary
}

part() {  # name, seconds, command: only listed as long as nothing is wanted
    if [[ -z $wanted ]]; then names+=("$1"); return; fi
    [[ $wanted == *" $1 "* ]] || return 0
    local start=$SECONDS limit=$((${LIMIT:-100000} - SECONDS)) result=0
    ((limit < $2)) || limit=$2
    if ! command -v "$3" > /dev/null; then end "$1" 0 "not there: $3"; return; fi
    if ((limit < 10)); then end "$1" 0 "no time left"; status=1; return; fi
    say "== $1, for at most $limit s"
    summary "$(printf '%-20s %9s  running' "$1" "")"$'\n'
    # Interrupted, pytest still says what failed. What does not end then is killed.
    timeout --signal=INT --kill-after=5 $((limit - 5)) "${@:3}" < /dev/null 2>&1 | tee -a "$folder/log.txt" || result=$?
    case $result in
        0) end "$1" $((SECONDS - start)) ok ;;
        124 | 137) end "$1" $((SECONDS - start)) "out of time" ;;
        *) end "$1" $((SECONDS - start)) "failed: $result" ;;
    esac
    ((result == 0)) || status=1
    return $result
}

tests() {  # name, seconds, what pytest is to run
    part "$1" "$2" "$python" -m pytest -q -rfEs --tb=short --maxfail=20 --benchmark-disable -p no:cacheprovider \
        ${dry:+--collect-only -q} "${workers[@]}" "${@:3}"
}

measure() {  # name, seconds: a group of benchmarks.ops. Its status 75 asks for another process, for the rows that are left
    part "$1" "$2" bash -c 'while "$@"; status=$?; ((status == 75)); do :; done; exit $status' measure \
        "$python" -m benchmarks.ops --seconds $seconds --json "$folder/ops.json" --resume --groups "$3" $dry
}

sanitize() {  # tool, seconds, options
    local watch=(compute-sanitizer --tool "$1" --error-exitcode 3 "${@:3}")
    [[ -z $dry ]] || watch=()  # the machine of a dry run need not have the tools
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 part "$1" "$2" "${watch[@]}" "$python" -m tests.laws.test_on_a_gpu $dry
}

counters() {  # op, what the names of its kernels have in common
    local watch=(ncu --set full --page details --clock-control none --kernel-name-base mangled --kernel-name "regex:$2"
        --force-overwrite --export "$folder/ncu-$1")
    [[ -z $dry ]] || watch=()
    part "ncu-$1" 50 "${watch[@]}" "$python" -m benchmarks.ops --once --groups kernels "${dry:-$1}"
}

build='"$0" setup.py build_ext --inplace ${2:+--help} && tar -cf "$1" specvis_kernels/*.so'
seconds=0.1 decoded=(--sizes shipped B XL --seconds 4 --ours) families=()
[[ -z $dry ]] || seconds=0 decoded=(--sizes shipped --methods vanilla --batch 1 --seconds 0 --ours)
[[ -z $dry ]] || families=(--models tiny --batch 1 --runs 1)

parts() {
    part build "$build_limit" bash -c "$build" "$python" "$built" $dry || wanted=" "  # and nothing else
    part smoke 100 "$python" -m benchmarks.smoke $dry || (($? != 3)) || wanted=" "
    measure ops 160 kernels
    part families 300 "$python" -m benchmarks.families "${families[@]}" --json "$folder/families.json"
    tests tests 140 "${ops[@]}" -k "(cuda or oracle) and not triton"
    tests graphs 60 tests/laws/test_on_a_gpu.py -k "not loop"
    tests loops 60 tests/laws/test_on_a_gpu.py -k loop
    part decode 330 "$python" -m benchmarks.decode "${decoded[@]}" --json "$folder/decode.json"
    sanitize memcheck 90 --kernel-name kns=specvis
    sanitize racecheck 90 --kernel-name kns=specvis
    counters draft_frontier specvis
    counters verify_logits specvis
    counters tree_attention tree_attention
    measure baselines 90 baselines
    tests triton 120 "${ops[@]}" --triton -k triton
    sanitize initcheck 70
    sanitize synccheck 60 --kernel-name kns=specvis
    measure others 60 others
}

workers=()
if $python -c "import xdist, pytest_timeout" 2> /dev/null; then  # a test that hangs takes only its worker with it
    cores=$(nproc)
    workers=(-n $((cores < 8 ? cores : 8)) --dist worksteal --timeout 110 --timeout-method thread)
fi
ops=(tests/laws/test_every_op.py)
for op in specvis_kernels/[a-z]*.py; do
    for test in "tests/kernels/test_$(basename "$op")" "tests/kernels/test_$(basename "$op" .py)"_*.py; do
        [[ ! -e $test ]] || ops+=("$test")
    done
done
built="" build_limit=150
parts
$python -c "import numpy, pytest, pytest_benchmark, PIL, safetensors, tqdm, click, matplotlib" || exit 1
for name in "$@"; do
    [[ " ${names[*]} " == *" $name "* ]] || { echo "no part $name, only ${names[*]}"; exit 2; }
done

gpu='import sys
try: import torch
except ImportError: sys.exit("PYTHON must be an interpreter that has torch")
if not torch.cuda.is_available(): sys.exit("torch finds no GPU here: make gpu is for a machine that has one. "
    "DRY=1 tries the parts without one; the part build alone needs none, with TORCH_CUDA_ARCH_LIST=9.0")
print("%d.%d" % torch.cuda.get_device_capability())'
if [[ $dry ]]; then
    TORCH_CUDA_ARCH_LIST=9.0
elif [[ $* == build && ${TORCH_CUDA_ARCH_LIST:-} ]]; then
    build_limit=3600
else
    TORCH_CUDA_ARCH_LIST=$($python -c "$gpu") || exit 1
fi
export TORCH_CUDA_ARCH_LIST
sources=$(cat setup.py $(find csrc -type f | LC_ALL=C sort) | sha256sum | cut -c1-12)
built=$folder/built-$TORCH_CUDA_ARCH_LIST-$sources.tar
if [[ $dry ]]; then
    built=/dev/null
else
    for file in "$built" "$folder/ops.json"; do
        [[ -e $file || ! -e $before/$(basename "$file") ]] || cp "$before/$(basename "$file")" "$folder"
    done
    [[ -e $built ]] || for file in "$before"/built-*.tar; do
        [[ ! -e $file ]] || say "$file is of other sources or for another GPU"
    done
    [[ -e $built ]] && tar -xf "$built"
fi
wanted=" ${*:-${names[*]}} "
[[ -e $built ]] || wanted+="build "
[[ $# -gt 0 || $dry || ! -e $built ]] || wanted=${wanted/ build / }
say "== $(date -u +%FT%TZ) parts$wanted"
parts
say "$(cat "$folder/summary.txt")"
exit $status

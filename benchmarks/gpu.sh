#!/usr/bin/env bash
# For a machine with a GPU, with its own torch and without a network: builds for that GPU, compares every op on CUDA
# with its oracle, measures, and looks for bad accesses, races and uninitialized reads.
#   make gpu          or [PYTHON=python3] [OUT=out] [BEFORE=out] [LIMIT=seconds] bash benchmarks/gpu.sh [PART...]
# The most useful parts come first; each has a time limit, 27 minutes in all. A part that fails does not stop the next;
# the exit status says whether any failed. OUT gets
#   log.txt          the output of the parts, line by line
#   summary.txt      a table: part, seconds, status
#   ops.json         times, written after each row; a part that is run again goes on where it ends
#   ncu-OP.ncu-rep   counters of three kernels
#   built-GPU-SOURCES.tar, the libraries
# The last two are copied from BEFORE, an earlier OUT: its rows are not timed again, and its libraries not built again.
# Where `build` is left out although it is needed, it comes first. Parts for three stays of ten minutes, with LIMIT=580:
#   build tests ops graphs
#   baselines memcheck racecheck triton program
#   ncu-guided_probs ncu-verify_tree ncu-expand_tree initcheck synccheck others oracles
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
before=${BEFORE:-out}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 SPECVIS_CUDA=1
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
}

tests() {  # name, seconds, what pytest is to run
    part "$1" "$2" "$python" -m pytest -q -rfEs --tb=short --benchmark-disable -p no:cacheprovider "${workers[@]}" "${@:3}"
}

measure() {  # name, seconds: a group of benchmarks.ops. Its status 75 asks for another process, for the rows that are left
    part "$1" "$2" bash -c 'while "$@"; status=$?; ((status == 75)); do :; done; exit $status' measure \
        "$python" -m benchmarks.ops --seconds 0.1 --json "$folder/ops.json" --resume --groups "$3"
}

sanitize() {  # tool, options
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 part "$1" 90 compute-sanitizer --tool "$1" --error-exitcode 3 "${@:2}" \
        "$python" -m tests.laws.test_on_a_gpu
}

counters() {  # op
    part "ncu-$1" 50 ncu --set full --page details --clock-control none --kernel-name-base mangled \
        --kernel-name regex:specvis --force-overwrite --export "$folder/ncu-$1" \
        "$python" -m benchmarks.ops --once --groups kernels "$1"
}

parts() {
    part build 120 bash -c '"$0" setup.py build_ext --inplace && tar -cf "$1" specvis_kernels/*.so' "$python" "$built"
    tests tests 150 "${ops[@]}" -k "(cuda or oracle) and not triton"
    measure ops 200 kernels
    tests graphs 60 tests/laws/test_on_a_gpu.py
    measure baselines 120 baselines
    sanitize memcheck --kernel-name kns=specvis
    sanitize racecheck --kernel-name kns=specvis
    tests triton 120 "${ops[@]}" --triton -k triton
    tests program 120 "${others[@]}"
    for op in guided_probs verify_tree expand_tree; do counters $op; done
    sanitize initcheck
    sanitize synccheck --kernel-name kns=specvis
    measure others 80 others
    measure oracles 120 oracles
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
elsewhere=(tests/laws/test_on_a_gpu.py  # or without a GPU
    tests/slow/test_*.py tests/cuda_on_cpu/test_*.py)
others=()
for file in tests/test_*.py tests/*/test_*.py; do
    [[ " ${ops[*]} ${elsewhere[*]} " == *" $file "* ]] || others+=("$file")
done
built=""
parts
for name in "$@"; do
    [[ " ${names[*]} " == *" $name "* ]] || { echo "no part $name, only ${names[*]}"; exit 2; }
done

gpu='import sys
try: import torch
except ImportError: sys.exit("PYTHON must be an interpreter that has torch")
if not torch.cuda.is_available(): sys.exit("torch finds no GPU here: make gpu is for a machine that has one")
print("%d.%d" % torch.cuda.get_device_capability())'
TORCH_CUDA_ARCH_LIST=$($python -c "$gpu") || exit 1
export TORCH_CUDA_ARCH_LIST
built=built-$TORCH_CUDA_ARCH_LIST-$(cat setup.py $(find csrc -type f | sort) | sha256sum | cut -c1-12).tar
for file in "$built" ops.json; do
    [[ -e $folder/$file || ! -e $before/$file ]] || cp "$before/$file" "$folder"
done
[[ -e $folder/$built ]] && tar -xf "$folder/$built"
built=$folder/$built
wanted=" ${*:-${names[*]}} "
[[ -e $built ]] || wanted+="build "
[[ $# -gt 0 || ! -e $built ]] || wanted=${wanted/ build / }
say "== $(date -u +%FT%TZ) parts$wanted"
parts
say "$(cat "$folder/summary.txt")"
exit $status

#!/usr/bin/env bash
# Checks and measures the GPU engine on one card, in at most six minutes: tests/gpu/run.sh [--cpu-dry-run]
#
# Builds, checks every kernel against its reference, compares answers with the golden ones, measures what the card can
# do at most, then decoding, prefill and a server under 960 streams against that. Each part has a time limit, and one
# that fails does not stop the others. At the end comes a table; the status is 1 when a part has failed.
# With --cpu-dry-run the same parts run at tiny sizes without a GPU, the kernels through Triton's interpreter.
# PYTHON names the interpreter (default: python).
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
here=tests/gpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
total=360

part() { # part NAME SECONDS COMMAND...
    local name=$1 limit=$2 log="$work/$1.log" begun=$SECONDS status
    shift 2
    if ((limit > total - SECONDS)); then limit=$((total - SECONDS)); fi
    if ((limit <= 0)); then
        echo "| $name | not run: no time left |" >>"$work/table"
        failed=1
        return
    fi
    echo "== $name (at most $limit s)"
    timeout -k 5 "$limit" "$@" >"$log" 2>&1
    status=$?
    grep '^|' "$log" >>"$work/table"
    if ((status == 0)); then
        echo "| $name | passed in $((SECONDS - begun)) s |" >>"$work/table"
    else
        failed=1
        tail -n 25 "$log"
        if ((status == 124 || status == 137)); then reason="ran past $limit s"; else reason="status $status"; fi
        echo "| $name | FAILED after $((SECONDS - begun)) s: $reason |" >>"$work/table"
    fi
}

checks() { # checks NAME...: pytest over check files, without what it keeps between runs
    echo "-m pytest -p no:cacheprovider $(printf "$here/check_%s.py " "$@")"
}

if [[ ${1:-} == --cpu-dry-run ]]; then
    export CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES= OMP_NUM_THREADS=1
    total=600 # a busy machine without a GPU may take its time
    few="norms or first_layer or is_not_read or no_rows or run_eagerly or transfers or small_values"
    part machine 90 "$python" $here/machine.py "$work/ceilings.json" --tiny
    part kernels 300 env TRITON_INTERPRET=1 "$python" $(checks recurrent linear low_rank sampling transfers model) -k "$few"
    part speed 90 "$python" $here/speed.py tiny "$work/ceilings.json" --rows 1 4 --prompt 32
    part streams 120 "$python" $here/streams.py demo --streams 8 --seconds 1
elif [[ $# -eq 0 ]]; then
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
        echo "no CUDA or ROCm device is visible: check the driver, or try --cpu-dry-run" >&2
        exit 2
    }
    part machine 45 "$python" $here/machine.py "$work/ceilings.json"
    part kernels 70 "$python" $(checks recurrent linear low_rank sampling transfers)
    part golden 35 "$python" $(checks model)
    part speed-1.5b 35 "$python" $here/speed.py 1.5b "$work/ceilings.json"
    part speed-7.2b 55 "$python" $here/speed.py 7.2b "$work/ceilings.json"
    part streams 120 "$python" $here/streams.py 1.5b
else
    echo "usage: tests/gpu/run.sh [--cpu-dry-run]" >&2
    exit 2
fi

printf '\n| what | result |\n|---|---|\n'
cat "$work/table"
exit $failed

#!/usr/bin/env bash
# What docs/benchmarks.md says of a GPU, measured again: the benchmark beside the peers that are installed, the kernels'
# tests, memcheck, the conformance kit and its mutants.
#   benchmarks/prove_on_gpu.sh FOLDER [JOBS]
# The benchmark comes first and alone, since it is timed; then all that only needs to be right, in JOBS processes. Each
# part leaves its output in FOLDER when it ends, so that a run that is cut off has proven what it came to.
set -uo pipefail
folder=${1:?usage: prove_on_gpu.sh FOLDER [JOBS]}; jobs=${2:-$(nproc)}
mkdir -p "$folder"; export OMP_NUM_THREADS=1; red=0
part() { # NAME COMMAND...: runs it, says how it ended and how long it took
  local name=$1 began=$SECONDS; shift
  "$@" > "$folder/$name.txt" 2> "$folder/$name.err"; local code=$?
  ((code == 0)) || red=1
  echo "$name: $( ((code == 0)) && echo passed || echo "FAILED ($code)") in $((SECONDS - began)) s: $folder/$name.txt"
}
sightline() { python3 -W ignore -m sightline "$@"; }
for shapes in decode prefill; do
  part "bench-$shapes" sightline bench attention --device cuda --peers --shapes $shapes --json "$folder/$shapes.json"
done
part kernels python3 -m pytest -q -n "$jobs" -m "not slow" tests/kernels
part memcheck compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q tests/kernels/test_triton_decode.py \
  tests/kernels/test_triton_latent_decode.py tests/kernels/test_triton_project.py tests/kernels/test_triton_merge.py
for library in triton flashinfer torch flash_attention; do
  part "kit-$library" sightline conformance --device cuda --backend $library --backend $library-latent --jobs "$jobs"
done
part mutants python3 -m pytest -v -n "$jobs" -m gpu tests/conformance/test_mutants.py
part models python3 -m pytest -v -m gpu tests/test_cuda.py
exit $red

#!/usr/bin/env bash
# Repeats what docs/benchmarks.md reports about a GPU: the benchmark with all installed peers, the tests of the kernels,
# memcheck, the conformance kit and its mutants.
#   benchmarks/prove_on_gpu.sh FOLDER [JOBS]
# The benchmark runs first and alone, because it is timed; then everything else, in JOBS processes. Libraries that are not
# installed are skipped. Each part writes its output to FOLDER, even if it is interrupted.
set -uo pipefail
folder=${1:?usage: prove_on_gpu.sh FOLDER [JOBS]}; cores=$(nproc); jobs=${2:-$((cores < 16 ? cores : 16))}
mkdir -p "$folder"; export PYTHONWARNINGS=ignore; red=0
part() { # NAME COMMAND...: runs the command, prints how it ended and how long it took
  local name=$1 began=$SECONDS; shift
  "$@" > "$folder/$name.txt" 2> "$folder/$name.err"; local code=$?
  ((code == 0)) || red=1
  echo "$name: $( ((code == 0)) && echo passed || echo "FAILED ($code)") in $((SECONDS - began)) s: $folder/$name.txt"
}
is_there() { python3 -c "import $1" 2> /dev/null; }
for shapes in decode prefill; do
  part "bench-$shapes" python3 -m sightline bench attention --device cuda --peers --shapes $shapes --json "$folder/$shapes.json"
done
export OMP_NUM_THREADS=1
part kernels python3 -m pytest -q -n "$jobs" -m "not slow" tests/kernels
if command -v compute-sanitizer > /dev/null; then
  part memcheck compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q --timeout 0 \
    tests/kernels/test_triton_decode.py tests/kernels/test_triton_latent_decode.py \
    tests/kernels/test_triton_project.py tests/kernels/test_triton_merge.py
fi
declare -A needs=([triton]=triton [flashinfer]=flashinfer [torch]=torch [reference]=torch [flash_attention]=flash_attn.cute)
for library in triton flashinfer torch reference flash_attention; do
  is_there "${needs[$library]}" || { echo "kit-$library: not installed"; continue; }
  part "kit-$library" python3 -m sightline conformance --device cuda --jobs "$jobs" \
    --backend $library --backend $library-latent
done
part mutants python3 -m pytest -v -n "$jobs" -m gpu tests/conformance/test_mutants.py
part models python3 -m pytest -v -m gpu -k "not whole_kit" tests/test_cuda.py # the kit has run above
exit $red

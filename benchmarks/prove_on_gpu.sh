#!/usr/bin/env bash
# What docs/benchmarks.md says of a GPU, measured again: the benchmark beside the peers that are installed, the kernels'
# tests, memcheck, the conformance kit and its mutants.
#   benchmarks/prove_on_gpu.sh FOLDER [JOBS]
# The benchmark comes first and alone, since it is timed; then all that only needs to be right, in JOBS processes. What is
# not installed is passed over. Each part leaves its output in FOLDER; of a part that is cut off, what was tried is there.
set -uo pipefail
folder=${1:?usage: prove_on_gpu.sh FOLDER [JOBS]}; cores=$(nproc); jobs=${2:-$((cores < 16 ? cores : 16))}
mkdir -p "$folder"; export PYTHONWARNINGS=ignore; red=0
part() { # NAME COMMAND...: runs it, says how it ended and how long it took
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

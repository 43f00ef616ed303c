#!/usr/bin/env bash
# Repeats what docs/benchmarks.md reports about a GPU, and proves its kernels there.
#   benchmarks/prove_on_gpu.sh FOLDER [JOBS] [--only GROUP,GROUP]
# The groups, all of them without --only:
#   attention  the benchmark with all installed peers, the tests of the kernels, memcheck, the conformance kit and its
#              mutants, a real model
#   hybrids    prompts of recurrent layers beside other libraries, the kit of all their backends, models; 8 minutes at most
#   steps      decode steps of a hybrid, and of recurrent layers beside other libraries; 6 minutes at most
#   sparse     indexers, chosen entries, entries in host memory, the kit, models, the host tier; 10 minutes at most
#   compressed windows with compressed entries, and indexers over them: the benchmark, kernels, texts, the kit; 10 minutes at most
#   ranks      what ranks do together, by NCCL, with one rank; 3 minutes at most
# FLASHMLA may name the library of FlashMLA's sparse kernel (flashmla_ops.abi3.so of sglang-kernel), to be timed too.
# What is timed runs first and alone; then the tests, in JOBS processes. Libraries that are not installed are skipped.
# Each part has a time limit and writes its output to FOLDER, which is kept if the part is cut short.
set -uo pipefail
usage="usage: prove_on_gpu.sh FOLDER [JOBS] [--only attention,hybrids,steps,sparse,compressed,ranks]"
fail() { echo "$1; $usage" >&2; exit 2; }
given=() only=attention,hybrids,steps,sparse,compressed,ranks
while (($#)); do
  case $1 in
    --only) only=${2:?$usage}; shift 2 ;;
    -*) fail "unknown option $1" ;;
    *) given+=("$1"); shift ;;
  esac
done
((${#given[@]} == 1 || ${#given[@]} == 2)) || fail "expected a folder"
folder=${given[0]}; cores=$(nproc); jobs=${given[1]:-$((cores < 16 ? cores : 16))}
half=$(((jobs + 1) / 2)); here=$(cd "$(dirname "$0")" && pwd)
IFS=, read -ra groups <<< "$only"
for group in "${groups[@]}"; do
  [[ $group =~ ^(attention|hybrids|steps|sparse|compressed|ranks)$ ]] || fail "expected names of groups, got '$group'"
done
mkdir -p "$folder"; : > "$folder/failed"
export PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1

part() { # NAME SECONDS COMMAND...: runs the command, prints how it ended and how long it took
  local name=$1 limit=$2 began=$SECONDS signal=TERM; shift 2
  # Interrupted, pytest still tells what has failed so far.
  [[ $* == *pytest* ]] && signal=INT
  timeout --signal $signal --kill-after 15 "$limit" "$@" > "$folder/$name.txt" 2> "$folder/$name.err"; local code=$? how=passed
  ((code == 0)) || { echo "$name" >> "$folder/failed"; how="FAILED ($code)"; }
  ((code == 124 || code == 137)) && how="CUT SHORT after $limit s"
  ((code)) && [[ -s $folder/$name.err ]] || rm -f "$folder/$name.err"
  echo "$name: $how in $((SECONDS - began)) s: $folder/$name.txt"
}
reasons() { # NAME...: prints what the kit says of each row, and why a check failed
  local name
  for name in "$@"; do
    [[ -e $folder/$name.txt ]] || continue
    echo "--- $name"
    cat "$folder/$name.txt" "$folder/$name.err" 2> /dev/null \
      | grep -E '^[^ ].* on |FAILED|^  (blocked|proven|not proven)|^    ($|[^f])|: failed \(' | cut -c 1-500 | head -n 60 \
      || tail -n 5 "$folder/$name.err"
  done
}
tests() { # NAME SECONDS PROCESSES ARGUMENTS...
  part "$1" "$2" python3 -m pytest -v --tb=short -n "$3" "${@:4}"
}
kit() { # NAME SECONDS PROCESSES ARGUMENTS...
  part "$1" "$2" python3 -m sightline conformance --device cuda --jobs "$3" "${@:4}"
}
is_there() { python3 -c "import $1" 2> /dev/null; }

time_attention() {
  for shapes in decode prefill; do
    part "bench-$shapes" 1500 python3 -m sightline bench attention --device cuda --peers --shapes $shapes --json "$folder/$shapes.json"
  done
}
time_hybrids() {
  part linear 215 python3 "$here/linear_attention.py" prefill --budget 85
  cat "$folder/linear.txt"; tail -n 5 "$folder/linear.err" 2> /dev/null
}
time_steps() {
  for rows in 1 64; do
    part "latency-$rows" $((rows == 1 ? 120 : 70)) python3 -m sightline bench latency --dummy-weights --model-config qwen3-next-12-layers \
      --attention-backend triton --profile --batch-size $rows --input-len 512 --contexts 512 --num-iters 2 \
      --cache-tokens 65536 --max-model-len 2048 --max-num-seqs 64 --max-num-batched-tokens 2048
  done
  part linear-decode 150 python3 "$here/linear_attention.py" decode --budget 45
}
time_sparse() {
  part sparse 150 python3 "$here/sparse_attention.py" --budget 60 ${FLASHMLA:+--flashmla "$FLASHMLA"}
  part hisparse 150 python3 "$here/hisparse.py"
}
time_compressed() {
  part filled 150 python3 "$here/filled_decode.py"
  part compressed 150 python3 "$here/compressed_attention.py" --budget 60
}
test_attention() {
  tests kernels 900 "$jobs" tests/kernels
  if command -v compute-sanitizer > /dev/null; then
    part memcheck 900 compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q --timeout 0 \
      tests/kernels/test_triton_decode.py tests/kernels/test_triton_latent_decode.py \
      tests/kernels/test_triton_project.py tests/kernels/test_triton_merge.py
  fi
  declare -A needs=([triton]=triton [flashinfer]=flashinfer [torch]=torch [reference]=torch [flash_attention]=flash_attn.cute)
  for library in triton flashinfer torch reference flash_attention; do
    is_there "${needs[$library]}" || { echo "kit-$library: not installed"; continue; }
    kit "kit-$library" 1800 "$jobs" --backend $library --backend $library-latent
  done
  tests mutants 1200 "$jobs" -m gpu tests/conformance/test_mutants.py
  tests models 900 0 -m gpu -k "not whole_kit" tests/test_cuda.py # the kit has run above
}
test_hybrids() { # side by side, because compiling takes most of the time
  local library third=$(((jobs + 2) / 3)) sixth=$(((jobs + 5) / 6))
  # Tuning fla-core for every number of heads would take an hour: it gets one setting of each kernel.
  export FLA_CACHE_MODE=default FLA_CONFIG_DIR; FLA_CONFIG_DIR=$(mktemp -d)
  is_there fla && python3 "$here/fla_settings.py" "$FLA_CONFIG_DIR" 2> /dev/null
  for library in flashinfer fla; do
    is_there $library || { echo "kit-$library-recurrent: not installed"; continue; }
    kit "kit-$library-recurrent" 240 "$third" --backend $library-recurrent &
  done
  kit kit-hybrids 240 "$sixth" --backend triton-recurrent --backend triton-convolution &
  tests models-hybrids 240 "$sixth" -m gpu --timeout 120 tests/test_cuda_hybrids.py tests/test_hybrid_prefills_gpu.py &
  wait
  reasons kit-flashinfer-recurrent kit-fla-recurrent kit-hybrids
  grep -hE '^(FAILED|ERROR)|^[0-9= ]*(passed|failed)' "$folder/models-hybrids.txt" | cut -c 1-300 | head -n 20
}
test_steps() { :; }
test_sparse() {
  local checks=() check
  for check in sparse unchosen-entries chosen-pages choices-in-turn captured-decode; do checks+=(--check $check); done
  kit kit-index 270 "$half" --backend triton-index &
  tests models-sparse 270 "$half" --timeout 120 tests/test_cuda_sparse.py tests/test_host_tier_gpu.py \
    tests/kernels/test_triton_choose.py tests/kernels/test_hot_entries_kernels.py &
  kit kit-sparse 270 "$half" --backend triton-latent "${checks[@]}" &
  wait
}
time_ranks() { :; }
test_ranks() { tests ranks 180 0 -m gpu --timeout 120 tests/test_ranks_gpu.py; }
test_compressed() {
  kit kit-compressed 270 "$half" --backend triton-compressed --backend triton-compressed-index &
  tests compressed-kernels 270 "$half" --timeout 120 tests/kernels/test_triton_compressed.py tests/test_cuda_compressed.py &
  wait
}

for group in "${groups[@]}"; do "time_$group"; done
export OMP_NUM_THREADS=1
for group in "${groups[@]}"; do "test_$group"; done
[[ ! -s $folder/failed ]]

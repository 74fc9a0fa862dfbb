#!/usr/bin/env bash
# Repeat the stored run: compile, measure every cell in shards over the GPUs that are there, of the
# row operations, the losses, attention, linear_cross_entropy and further ones, then accuracy,
# fusion, host cost, the rankings of few rows, the ladder and its counters, attention's errors,
# memory and the steps of its forward:
#
#   benchmarks/h200.sh OUT [STAGE[=SECONDS]]...
#
#   benchmarks/h200.sh out                                  # all stages, each with its own limit
#   benchmarks/h200.sh out prepare=200 cells=300            # these stages, so long
#   ONLY_TORCH=1 benchmarks/h200.sh out cells=300           # torch alone as rival, in all cells
#
# Stages: prepare, cells, merge, accuracy, fusion, host, tuning; prepare-losses, losses;
# prepare-attention, attention (merges of parts among it); prepare-linear, linear; prepare-more,
# more (gradients, outer dims, fp8 and packed sequences); ladder, counters (needs ncu), errors
# (attention's, and its memory), steps (of attention's forward): for each of these nothing of the
# others is needed. All up to `more` that measure cells are cut in shards, one a GPU, and one that
# its seconds end goes on where it stopped when the command is run again. PYTHON names the
# interpreter (python3), CACHE a folder for what compilers make (OUT/cache), CUDA_VISIBLE_DEVICES
# the GPUs (all).
# To go on with a stored file on one GPU, put it where that GPU's shard would be:
#   cp benchmarks/results/h200/bench-rows.jsonl OUT/shards/cells-1-0.jsonl
# (on N GPUs: cells-N-0.jsonl to cells-N-(N-1).jsonl; `merge` keeps one line a cell).
# At the end: copy OUT/results/* to benchmarks/results/h200 and run `make readme`.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${1:?give a folder for what is measured}
shift
PYTHON=${PYTHON:-python3}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
CACHE=${CACHE:-$OUT/cache}
mkdir -p "$OUT/results" "$OUT/shards" "$CACHE"
OUT=$(cd "$OUT" && pwd) CACHE=$(cd "$CACHE" && pwd)
# One cache for all shards, which a later call of this command finds again.
export TORCHINDUCTOR_CACHE_DIR=$CACHE/inductor TRITON_CACHE_DIR=$CACHE/triton
export QUACK_CACHE_DIR=$CACHE/quack ONLINE_SOFTMAX_CACHE_DIR=$CACHE/online_softmax
export TORCHINDUCTOR_COMPILE_THREADS=1 # what is missing is compiled in place: no pool to start

OPS="softmax log_softmax softmax_backward log_softmax_backward logsumexp"
LOSSES="cross_entropy cross_entropy_both cross_entropy_in_forward token_stats"
ATTENTION="attention attention_backward attention_decode merge"
LINEAR=linear_cross_entropy
MORE="logsumexp_backward softmax_outer log_softmax_outer logsumexp_outer softmax_fp8 \
token_stats_both attention_varlen"
HOST_AGAINST=torch,compile,quack,liger
AGAINST=$HOST_AGAINST,tutorial,flash-attn,cut-cross-entropy # each where it has the operation
TYPES=bf16,fp16,fp32 LOSS_TYPES=bf16,fp32 ATTENTION_TYPES=bf16 LINEAR_TYPES=bf16 MORE_TYPES=bf16,fp32
[ -z "${ONLY_TORCH:-}" ] || AGAINST=torch HOST_AGAINST=torch
FEW=1x32000,16x32000,1x65536,16x65536,1x128256,16x128256,1x262144,16x262144,1x1048576,16x1048576
# Of the GPUs named, or else of all: torch counts them, under any name.
GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
[ "$GPUS" -gt 0 ] || { echo "h200.sh: torch sees no CUDA GPU here" >&2; exit 2; }
IFS=, read -ra DEVICES <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((GPUS - 1)))}"
CORES=$(nproc)

bench() { "$PYTHON" -m online_softmax.lab.cli bench "$@"; }

# A command on each GPU: I and GPUS are its place and their number. Fails if one of them fails.
everywhere() {
  local pids=() failed=0 I
  for I in $(seq 0 $((GPUS - 1))); do
    CUDA_VISIBLE_DEVICES=${DEVICES[$I]} "$@" "$I" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return $failed
}

# One GPU's shard. $1: name of the files; $2: seconds; $3: operations; $4: types; last: the shard.
prepare_shard() {
  # shellcheck disable=SC2086
  bench $3 --grid all --dtype "$4" --against "$AGAINST" --shard "$5/$GPUS" --prepare \
    --seconds "$2" --workers $((CORES / GPUS > 0 ? CORES / GPUS : 1)) 2>>"$OUT/shards/$1-$5.log"
}

measure_shard() {
  # shellcheck disable=SC2086
  bench $3 --grid all --dtype "$4" --against "$AGAINST" --shard "$5/$GPUS" --seconds "$2" --json \
    --resume --save "$OUT/shards/$1-$GPUS-$5.jsonl" >/dev/null 2>>"$OUT/shards/$1-$5.log"
}

# The shards of $1 as one file, bench-$2.jsonl.
merge() {
  rm -f "$OUT/results/bench-$2.jsonl"
  bench --from "$OUT/shards/$1-"*.jsonl --json --save "$OUT/results/bench-$2.jsonl"
}

accuracy() {
  rm -f "$OUT/results/accuracy-rows.jsonl" # takes seconds: measured anew
  # shellcheck disable=SC2086
  bench $OPS --accuracy --save "$OUT/results/accuracy-rows.jsonl" >"$OUT/shards/accuracy.log"
}

ladder_shard() {
  "$PYTHON" benchmarks/ladder.py --out "$OUT/results" --shard "$1/$GPUS" 2>>"$OUT/shards/ladder-$1.log"
}

counters() {
  local cols
  for cols in 4096 65536; do
    "$PYTHON" -m online_softmax.lab.cli profile ladder registers torch --cols "$cols" \
      --save "$OUT/results/ncu-4096x$cols-float32.jsonl" >>"$OUT/shards/counters.log"
  done
}

errors() {
  "$PYTHON" -m online_softmax.lab.attentionerrors --out "$OUT/results/attention-errors.jsonl" \
    >>"$OUT/shards/errors.log"
  "$PYTHON" -m online_softmax.lab.attentionerrors --memory \
    --out "$OUT/results/attention-memory.jsonl" >>"$OUT/shards/errors.log"
}

steps() {
  "$PYTHON" -m online_softmax.lab.attentionsteps --out "$OUT/results/attention-steps.jsonl" \
    --seconds "$1" >"$OUT/shards/steps.log"
}

tuning() {
  local op
  for op in $OPS; do
    bench --tune "$op" --cells "$FEW" --dtype bf16,fp32 --seconds "$1" --json --resume \
      --save "$OUT/results/tuning-few-$op.jsonl" >/dev/null 2>>"$OUT/shards/tuning.log"
  done
}

stage() {
  local name=$1 seconds=$2 begun=$SECONDS rc=0
  case $name in
    prepare) everywhere prepare_shard prepare "$seconds" "$OPS" "$TYPES" || rc=$? ;;
    cells) everywhere measure_shard cells "$seconds" "$OPS" "$TYPES" || rc=$? ;;
    merge) merge cells rows || rc=$? ;;
    prepare-losses)
      everywhere prepare_shard "$name" "$seconds" "$LOSSES" "$LOSS_TYPES" || rc=$? ;;
    losses)
      everywhere measure_shard losses "$seconds" "$LOSSES" "$LOSS_TYPES" || rc=$?
      merge losses losses || rc=$? ;;
    prepare-attention)
      everywhere prepare_shard "$name" "$seconds" "$ATTENTION" "$ATTENTION_TYPES" || rc=$? ;;
    attention)
      everywhere measure_shard attention "$seconds" "$ATTENTION" "$ATTENTION_TYPES" || rc=$?
      merge attention attention || rc=$? ;;
    prepare-linear)
      everywhere prepare_shard "$name" "$seconds" "$LINEAR" "$LINEAR_TYPES" || rc=$? ;;
    linear)
      everywhere measure_shard linear "$seconds" "$LINEAR" "$LINEAR_TYPES" || rc=$?
      merge linear linear || rc=$? ;;
    prepare-more) everywhere prepare_shard "$name" "$seconds" "$MORE" "$MORE_TYPES" || rc=$? ;;
    more)
      everywhere measure_shard more "$seconds" "$MORE" "$MORE_TYPES" || rc=$?
      merge more more || rc=$? ;;
    accuracy) CUDA_VISIBLE_DEVICES=${DEVICES[0]} accuracy || rc=$? ;;
    fusion)
      CUDA_VISIBLE_DEVICES=${DEVICES[0]} "$PYTHON" benchmarks/fusion.py --seconds "$seconds" \
        --out "$OUT/results/bench-fusion.jsonl" 2>>"$OUT/shards/fusion.log" || rc=$? ;;
    host) # eager calls, their pieces, torch's functions under override_torch, a fresh process
      rm -f "$OUT/results/bench-host.jsonl"
      CUDA_VISIBLE_DEVICES=${DEVICES[0]} bench --host 8,1024 --against "$HOST_AGAINST" \
        --save "$OUT/results/bench-host.jsonl" >"$OUT/shards/host.log" || rc=$? ;;
    tuning) CUDA_VISIBLE_DEVICES=${DEVICES[0]} tuning "$seconds" || rc=$? ;;
    ladder) everywhere ladder_shard || rc=$? ;;
    counters) CUDA_VISIBLE_DEVICES=${DEVICES[0]} counters || rc=$? ;;
    errors) CUDA_VISIBLE_DEVICES=${DEVICES[0]} errors || rc=$? ;;
    steps) CUDA_VISIBLE_DEVICES=${DEVICES[0]} steps "$seconds" || rc=$? ;;
    *) echo "h200.sh: no stage $name: prepare, cells, merge, prepare-losses, losses," \
         "prepare-attention, attention, prepare-linear, linear, prepare-more, more, accuracy, fusion, host," \
         "tuning, ladder, counters, errors, steps" >&2
       exit 2 ;;
  esac
  echo "h200.sh: $name: $((SECONDS - begun)) s$([ $rc = 0 ] || echo ", exit status $rc")" >&2
  return $rc
}

[ $# -gt 0 ] || set -- prepare=240 cells=500 merge prepare-losses=240 losses=300 \
  prepare-attention=200 attention=300 prepare-linear=120 linear=200 prepare-more=150 more=250 accuracy fusion=120 \
  host tuning=60 ladder counters errors steps=150
failed=0
for each in "$@"; do
  name=${each%%=*} seconds=${each#*=}
  [ "$seconds" != "$each" ] || seconds=600
  stage "$name" "$seconds" || failed=1
done
grep -h "^note: " "$OUT"/shards/{cells,losses,attention,linear,more}-*.log 2>/dev/null | tail -"$((2 * GPUS))" >&2 || true
exit $failed

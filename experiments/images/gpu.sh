#!/usr/bin/env bash
# Trains models of MNIST on one GPU, all at the same time, scores them on the test images and packs them:
#
#   bash experiments/images/gpu.sh DATA OUT [MINUTES]
#
#   linear    preset "best" with linear attention, of the paper's size
#   softmax   the same with softmax
#   small     preset "small" with linear attention
#
# DATA holds MNIST's files or the folder mnist with them. OUT gets runs/NAME and packed/NAME, with evaluation.json in it.
# The schedules fit into MINUTES (default 6); what comes before the first step, scores and pictures take two minutes more. A run
# that is there already is resumed. PYTHON is the interpreter (default python3); lintra need not be installed.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
DATA=$(realpath "$1")
mkdir -p "$2"
OUT=$(realpath "$2")
MINUTES=${3:-6}
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export LINTRA_DATA=$DATA PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
SETTINGS=(--batch 64 --lr 0.006 --warmup 300 --steps 60000 --precision bf16 --save-every 2000 --validate-every 1000
    --max-minutes "$MINUTES")

train() { # NAME ARGUMENTS...: a run, its score, and the model as it can be passed on
    local name=$1 run=$OUT/runs/$1 model=$OUT/packed/$1
    shift
    if [ -e "$run/run.json" ]; then
        "$PYTHON" -m lintra.cli train --resume "$run"
    else
        "$PYTHON" -m lintra.cli train images "$@" "${SETTINGS[@]}" --dir "$run"
    fi
    "$PYTHON" experiments/ship.py "$run" "$model"
    "$PYTHON" -m lintra.cli evaluate --model "$model" --batch 250 --json "$model/evaluation.json"
    [ "$name" = softmax ] || "$PYTHON" experiments/ship.py --gpu "$gpu" "$run" "$model" # its card, which is of linear ones
    echo "$name is packed in $model"
}

gpu=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name())')
mkdir -p "$OUT/logs"
failed=0
declare -A jobs
start() { train "$@" >"$OUT/logs/$1.txt" 2>&1 & jobs[$1]=$!; }
start linear
start softmax --attention softmax
start small --preset small
for name in "${!jobs[@]}"; do
    wait "${jobs[$name]}" || { echo "$name failed: see $OUT/logs/$name.txt" >&2; failed=1; }
done
exit $failed

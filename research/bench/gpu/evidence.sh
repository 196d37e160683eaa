#!/usr/bin/env bash
# Evidence from a GPU: what README and docs/kernels.md may claim once it is committed.
#
#   research/bench/gpu/evidence.sh pack MODEL ITEMS TEXT FOLDER           here: FOLDER/CALL.tar.gz, with all that each call needs
#   tar -xf CALL.tar.gz && OUT=RESULTS research/bench/gpu/evidence.sh CALL there, in a folder of its own
#   research/bench/gpu/evidence.sh unpack RESULTS FOLDER                   here: what `pairs` gave back
#
# The calls, by worth: `tests` runs the kernels' tests; `ratios` holds their speeds to the aims; `sweep` measures HellaSwag
# with quantized logits; `pairs` trains SmolLM2 as a Transformer, DIFF V1 and V2 on equal tokens. No call needs what
# another one left, each ends within ten minutes and leaves its raw results, and an archive holds at most 64 MiB: MODEL, a
# .gguf file or a folder of 16-bit weights, travels at some 3.4 bits per weight (research/bench/gpu/carried.py), and what runs
# there is what they decode to. Results come in at most eight files of 16 MiB. Nothing is installed there, where torch,
# triton, transformers, safetensors, typer and pytest are.
set -euo pipefail
cd "$(dirname "$0")/../../.."

PYTHON=${PYTHON:-python3}
MINUTES=${MINUTES:-8}
# DEVICE=cpu rehearses `sweep` and `pairs` where there is no GPU.
DEVICE=${DEVICE:-cuda}
LIMIT=$((64 << 20))
# Results of earlier runs, pages and models: nothing that a call needs.
LEFT_HERE=(':!bench/results' ':!research/results' ':!docs' ':!tests/golden' ':!examples' ':!diffquant/data/pocket')

pack() {
    local model=$1 items=$2 text=$3 folder=$4 call tree
    mkdir -p "$folder"
    tree=$(mktemp -d)
    git archive HEAD -- . "${LEFT_HERE[@]}" | tar -x -C "$tree"
    git rev-parse HEAD >"$tree/commit"
    for call in tests ratios; do archive "$tree" "$folder/$call.tar.gz"; done
    PYTHONPATH=. "$PYTHON" -m research.bench.gpu.carried pack "$model" "$tree/evidence/carried"
    cp "$items" "$tree/evidence/items"
    archive "$tree" "$folder/sweep.tar.gz"
    rm "$tree/evidence/items"
    xz --stdout "$text" >"$tree/evidence/text.txt.xz"
    archive "$tree" "$folder/pairs.tar.gz"
    rm -r "$tree"
}

archive() {
    tar -cz -C "$1" -f "$2" .
    if [ "$(stat --format %s "$2")" -gt "$LIMIT" ]; then
        echo "$2 is larger than 64 MiB, which is what travels at a time: take a smaller MODEL, or cut TEXT" >&2
        exit 1
    fi
}

facts() {
    mkdir -p "$OUT"
    {
        date --utc +%FT%TZ
        echo "commit $(cat commit)"
        nvidia-smi || echo "no nvidia-smi"
        "$PYTHON" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
    } >"$OUT/device.txt" 2>&1
}

run_tests() {
    timeout 540 make gpu-test PYTHON="$PYTHON" 2>&1 | tee "$OUT/gpu-test.txt"
}

run_ratios() {
    timeout 560 make gpu-bench PYTHON="$PYTHON" JSON="$OUT/gpu.json" 2>&1 | tee "$OUT/gpu-bench.txt"
}

model() {
    "$PYTHON" -m research.bench.gpu.carried unpack evidence/carried evidence/model
}

run_sweep() {
    export PYTHONPATH=.
    model
    "$PYTHON" -m diffquant convert evidence/model --output evidence/diff-v2 --to diff-v2
    timeout 500 "$PYTHON" -m diffquant sweep evidence/model evidence/diff-v2 --output evidence/sweep \
        --items evidence/items --limit 2000 --bits 16,8,6,4,3 --granularities tensor,row,row:shift \
        --device "$DEVICE" 2>&1 | tee "$OUT/sweep.txt"
    cp evidence/sweep/sweep.json evidence/sweep/table.csv "$OUT/"
}

run_pairs() {
    local status=0
    export PYTHONPATH=.
    model
    timeout 570 "$PYTHON" -m research.train.pairs train --base evidence/model --text evidence/text.txt.xz \
        --output evidence/pairs --minutes "$MINUTES" --device "$DEVICE" 2>&1 | tee "$OUT/pairs.log" || status=$?
    (cd evidence && find pairs -name '*.json*' -o -name 'delta.safetensors') |
        tar --create --directory evidence --files-from - | split --bytes 15MB --numeric-suffixes - "$OUT/pairs.tar."
    return $status
}

unpack() {
    mkdir -p "$2"
    cat "$1"/pairs.tar.* | tar --extract --directory "$2"
}

case ${1:-} in
    pack | unpack) "$@" ;;
    tests | ratios | sweep | pairs)
        facts
        "run_$1"
        ;;
    *)
        sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac

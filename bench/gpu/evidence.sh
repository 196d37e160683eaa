#!/usr/bin/env bash
# Evidence from a GPU: what README and docs/kernels.md may claim once it is committed.
#
#   bench/gpu/evidence.sh pack MODEL ITEMS.jsonl.gz TEXT FOLDER   here: FOLDER/CALL.tar, with all that each call needs
#   tar -xf CALL.tar && OUT=RESULTS bench/gpu/evidence.sh CALL    there, in a folder of its own
#   bench/gpu/evidence.sh unpack RESULTS FOLDER                   here: what `pairs` gave back
#
# The calls, by worth: `tests` runs the kernels' tests; `ratios` holds their speeds to the aims; `sweep` measures HellaSwag
# with quantized logits; `pairs` trains SmolLM2 as a Transformer, DIFF V1 and V2 on equal tokens. No call needs what
# another one left, each ends within ten minutes and leaves its raw results, and an archive holds at most 64 MiB: MODEL is
# a .gguf file or a quantized folder. Results come in at most eight files of 16 MiB. Nothing is installed there, where
# torch, triton, transformers, safetensors, typer and pytest are.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
MINUTES=${MINUTES:-8}
# DEVICE=cpu rehearses `sweep` and `pairs` where there is no GPU.
DEVICE=${DEVICE:-cuda}
LIMIT=$((64 << 20))
# Results of earlier runs, and pages: nothing that a call needs.
LEFT_HERE=(':!bench/results' ':!research/results' ':!docs' ':!tests/golden' ':!examples')

pack() {
    local model=$1 items=$2 text=$3 folder=$4 call tree
    mkdir -p "$folder"
    tree=$(mktemp -d)
    git archive HEAD -- . "${LEFT_HERE[@]}" | tar -x -C "$tree"
    git rev-parse HEAD >"$tree/commit"
    for call in tests ratios; do archive "$tree" "$folder/$call.tar"; done
    # transformers asks for the package's version too.
    local installed
    installed=$("$PYTHON" -c 'import gguf, pathlib; print(pathlib.Path(gguf.__file__).parents[1])')
    mkdir -p "$tree/evidence/packages"
    cp -r "$installed"/gguf "$installed"/gguf-*.dist-info "$tree/evidence/packages/"
    if [ -d "$model" ]; then cp -r "$model" "$tree/evidence/model"; else cp "$model" "$tree/evidence/model.gguf"; fi
    cp "$items" "$tree/evidence/items.jsonl.gz"
    archive "$tree" "$folder/sweep.tar"
    rm "$tree/evidence/items.jsonl.gz"
    xz --stdout "$text" >"$tree/evidence/text.txt.xz"
    archive "$tree" "$folder/pairs.tar"
    rm -r "$tree"
}

archive() {
    tar -c -C "$1" -f "$2" .
    if [ "$(stat --format %s "$2")" -gt "$LIMIT" ]; then
        echo "$2 is larger than 64 MiB, which is what travels at a time: quantize MODEL to fewer bits, or cut TEXT" >&2
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

# The model that travelled, and the DIFF V2 made of it.
model() {
    if [ -d evidence/model ]; then echo evidence/model; else echo evidence/model.gguf; fi
}

run_sweep() {
    export PYTHONPATH=.:evidence/packages
    "$PYTHON" -m diffquant.cli convert "$(model)" --output evidence/diff-v2 --to diff-v2
    timeout 500 "$PYTHON" -m diffquant.cli sweep "$(model)" evidence/diff-v2 --output evidence/sweep \
        --items evidence/items.jsonl.gz --limit 2000 --bits 16,8,6,4,3 --granularities tensor,row,row:shift \
        --device "$DEVICE" 2>&1 | tee "$OUT/sweep.txt"
    cp evidence/sweep/sweep.json evidence/sweep/table.csv "$OUT/"
}

run_pairs() {
    local status=0
    export PYTHONPATH=.:evidence/packages
    timeout 570 "$PYTHON" -m research.train.pairs train --base "$(model)" --text evidence/text.txt.xz \
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

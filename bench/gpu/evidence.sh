#!/usr/bin/env bash
# Evidence from one GPU: what README and docs/kernels.md may claim once it is committed.
#
#   bench/gpu/evidence.sh pack MODEL.gguf ITEMS.jsonl.gz BOOKS.txt FOLDER   here: what travels, as FOLDER/1, 2 and 3
#   OUT=RESULTS bench/gpu/evidence.sh N FOLDER/N                            there: command N of 4, the last without a folder
#   bench/gpu/evidence.sh unpack RESULTS FOLDER                             here: what the fourth gave back
#
# It is for a machine that runs nothing longer than ten minutes, takes 64 MiB at a time, and gives back eight files of
# 16 MiB: MODEL travels in three parts, and results come in pieces of 15 MB. Nothing is installed there. It has torch,
# triton, transformers, safetensors, typer and pytest; the package gguf travels with the model.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
# What lasts from one command to the next.
STATE=${STATE:-${TMPDIR:-/tmp}/evidence}
MINUTES=${MINUTES:-15}

pack() {
    local model=$1 items=$2 books=$3 folder=$4 part
    mkdir -p "$folder"/{1,2,3}
    split --number 3 --numeric-suffixes=1 --suffix-length 1 "$model" "$folder/model."
    for part in 1 2 3; do mv "$folder/model.$part" "$folder/$part/"; done
    sha256sum <"$model" >"$folder/3/model.sha256"
    cp "$items" "$folder/3/items.jsonl.gz"
    xz --stdout "$books" >"$folder/3/books.txt.xz"
    git rev-parse HEAD >"$folder/1/commit"
    cp -r "$("$PYTHON" -c 'import gguf, pathlib; print(pathlib.Path(gguf.__file__).parent)')" "$folder/3/gguf"
    for part in 1 2 3; do
        if [ "$(du --summarize --bytes "$folder/$part" | cut -f1)" -gt $((64 << 20)) ]; then
            echo "$folder/$part is larger than 64 MiB, which is what travels at a time" >&2
            exit 1
        fi
    done
}

keep() {
    mkdir -p "$STATE" "$OUT"
    cp -r "$1"/. "$STATE/"
}

# Ratios against their aims.
first() {
    keep "$1"
    {
        date --utc +%FT%TZ
        echo "commit $(cat "$STATE/commit")"
        nvidia-smi || echo "no nvidia-smi"
        "$PYTHON" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
    } >"$OUT/device.txt" 2>&1
    timeout 540 make gpu-bench PYTHON="$PYTHON" JSON="$OUT/gpu.json" 2>&1 | tee "$OUT/gpu-bench.txt"
}

# The tests, and a profile of each of the two kernels that the aims hang on.
second() {
    local status=0
    keep "$1"
    timeout 420 make gpu-test PYTHON="$PYTHON" 2>&1 | tee "$OUT/gpu-test.txt" || status=$?
    if command -v ncu >"$STATE/ncu.txt"; then
        profile prefill_v1 'prefill V1, 8192 tokens, float16'
        profile decode_share 'decode V1, context 16K, batch 8, float16, CUDA graphs'
    else
        echo "no ncu: nothing is profiled" | tee "$OUT/no-profile.txt"
    fi
    return $status
}

profile() {
    PYTHONPATH=. timeout 75 ncu --target-processes all --set full --kernel-name "regex:$1" --launch-skip 3 \
        --launch-count 1 --force-overwrite --export "$OUT/$1" "$PYTHON" -m diffquant.bench.gpu --only "$2" ||
        echo "no profile of $1 within its time" | tee "$OUT/$1.txt"
}

# Training goes on when this command ends; beside it SmolLM2 and the V2 made of it are swept.
third() {
    keep "$1"
    cat "$STATE"/model.[123] >"$STATE/model.gguf"
    sha256sum --check --quiet <(sed "s|-\$|$STATE/model.gguf|" "$STATE/model.sha256")
    unxz --keep --force "$STATE/books.txt.xz"
    export PYTHONPATH=.:$STATE
    setsid nohup "$PYTHON" -m research.train.pairs train --base "$STATE/model.gguf" --text "$STATE/books.txt" \
        --output "$STATE/pairs" --minutes "$MINUTES" --device cuda >"$STATE/pairs.log" 2>&1 </dev/null &
    "$PYTHON" -m diffquant.cli convert "$STATE/model.gguf" "$STATE/diff-v2" --to diff-v2
    timeout 500 "$PYTHON" -m diffquant.cli sweep "$STATE/model.gguf" "$STATE/diff-v2" --output "$STATE/sweep" \
        --items "$STATE/items.jsonl.gz" --bits 16,8,6,4,3 --granularity tensor,row,row:shift --device cuda \
        2>&1 | tee "$OUT/sweep.txt"
    cp "$STATE"/sweep/sweep.json "$STATE"/sweep/table.csv "$OUT/"
}

# What was trained, in pieces.
fourth() {
    local seconds=${WAIT:-480}
    mkdir -p "$OUT"
    while [ ! -e "$STATE/pairs/results.json" ] && [ $((seconds -= 5)) -gt 0 ]; do sleep 5; done
    tail -n 40 "$STATE/pairs.log" >"$OUT/pairs.log"
    (cd "$STATE" && find pairs -name '*.json*' -o -name 'delta.safetensors') |
        tar --create --directory "$STATE" --files-from - | split --bytes 15MB --numeric-suffixes - "$OUT/pairs.tar."
    [ -e "$STATE/pairs/results.json" ] || {
        echo "training is not done: the deltas that are there came back without results.json" >&2
        exit 1
    }
}

unpack() {
    mkdir -p "$2"
    cat "$1"/pairs.tar.* | tar --extract --directory "$2"
}

case ${1:-} in
    pack | unpack) "$@" ;;
    1) first "$2" ;;
    2) second "$2" ;;
    3) third "$2" ;;
    4) fourth ;;
    *)
        sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac

#!/bin/sh
# Motif-2.6B, or another Motif, through diffquant: download, inspect, sweep, quantize, export, verify, run.
#
#   examples/motif.sh [Motif-Technologies/Motif-2.6B] [FOLDER]
#
# It needs a network, `pip install '.[onnx,search]'` in a clone, and disk for the weights twice over. The 2.6B takes 5.2 GB in bfloat16,
# the 12.7B 25 GB. Interrupted, it goes on where it stopped when it is started again.
set -eu

model=${1:-Motif-Technologies/Motif-2.6B}
folder=${2:-motif}
weights=$folder/weights

# Names alone; the modelling code that the repository has is not run.
hf download "$model" --local-dir "$weights" \
    --include "*.safetensors" --include "*.json" --include "*.txt" --include "*.model" --include "*.jinja" --include "*.md" --include "LICENSE*"

diffquant inspect "$weights"

# What each width costs in perplexity: weights, KV cache and attention logits, each alone.
diffquant sweep "$weights" --output "$folder/sweep" --tasks perplexity --targets weights,kv,logits --bits 16,8,6,4

# Which tensors bear 4 bits, under a budget of 4.5 bits a weight.
diffquant search "$weights" --output "$folder/search" --budget 4.5

[ -d "$folder/4bit" ] || diffquant quantize "$weights" --output "$folder/4bit" --weights 4:g128 --rounding mse

[ -d "$folder/onnx" ] || diffquant export "$folder/4bit" --output "$folder/onnx" --embed 8
diffquant verify "$folder/onnx" "$folder/4bit"
diffquant run "$folder/onnx" --prompt "The difference between attention and noise is"

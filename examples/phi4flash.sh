#!/bin/sh
# Phi-4-mini-flash-reasoning through diffquant: download, inspect, sweep, outliers, quantize, generate.
#
#   examples/phi4flash.sh [microsoft/Phi-4-mini-flash-reasoning] [FOLDER]
#
# It needs a network, `pip install .` in a clone, and disk for the weights twice over: 7.7 GB in bfloat16. The scan of Mamba is plain
# torch, a token after the other, so that a text of some thousand tokens takes a while. Interrupted, it goes on where it stopped.
set -eu

model=${1:-microsoft/Phi-4-mini-flash-reasoning}
folder=${2:-phi4flash}
weights=$folder/weights

# Names alone; the modelling code that the repository has is not run.
hf download "$model" --local-dir "$weights" \
    --include "*.safetensors" --include "*.json" --include "*.txt" --include "*.model" --include "*.jinja" --include "*.md" --include "LICENSE*"

diffquant inspect "$weights"

# What each width costs in perplexity: weights, KV cache and attention logits, each alone.
diffquant sweep "$weights" --output "$folder/sweep" --tasks perplexity --targets weights,kv,logits --bits 16,8,6,4

diffquant outliers "$weights" --output "$folder/outliers" --tokens 16384

[ -d "$folder/4bit" ] || diffquant quantize "$weights" --output "$folder/4bit" --weights 4:g128 --rounding mse

diffquant generate "$folder/4bit" --chat --prompt "What is the difference of 91 and 19?"

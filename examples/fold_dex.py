"""Fold DEX into a Llama, which every verb of diffquant and stock transformers then take.

    python examples/fold_dex.py dex-llama folded-llama

DEX (arXiv 2505.16333) trains a matrix M, a bias b and a number λ for each layer of a Llama: for the selected heads h
the output O_h of attention becomes O_h − λ·(M·O_h + b). Behind the softmax all is linear. So o_proj's columns of head h
become W_h·(I − λM), and its bias loses λ·Σ W_h·b.

No weights are published, so the layout is an assumption: a folder with one model.safetensors and a Llama's config.json,
whose layers also have `self_attn.dex.proj.weight` [d, d], which is M, `self_attn.dex.lambda_learn`, one number, and if
there are any `proj.bias` [d] and `head_mask` [heads] of zeros and ones. Rename yours to these. λ has to be the trained
one, not one that training still mixes with its initial value.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def fold(source: Path, target: Path) -> None:
    """Write the Llama that computes what a DEX checkpoint does, rounded once to its dtype, into a new folder."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    blocks = [f"model.layers.{layer}.self_attn." for layer in range(config["num_hidden_layers"])]
    if any(f"{block}dex.proj.bias" in tensors for block in blocks) and not config.get("attention_bias"):
        config["attention_bias"] = True
        for block in blocks:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                weight = tensors[f"{block}{name}.weight"]
                tensors[f"{block}{name}.bias"] = weight.new_zeros(len(weight))
    for block in blocks:
        fold_layer(tensors, block)
    left = [name for name in tensors if ".dex." in name]
    if left:
        raise SystemExit(f"{source}: {', '.join(left[:3])} would be left out; this script does not know what they mean")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model.safetensors", "config.json", "*.py"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def fold_layer(tensors: dict[str, torch.Tensor], block: str) -> None:
    """Fold one layer's DEX into its o_proj, in float64, and take its parts out."""
    mixing = tensors.pop(f"{block}dex.proj.weight").double()
    lam = tensors.pop(f"{block}dex.lambda_learn").double()
    shift = tensors.pop(f"{block}dex.proj.bias", torch.zeros(len(mixing))).double()
    weight = tensors[f"{block}o_proj.weight"]
    heads = weight.double().unflatten(1, (-1, len(mixing)))
    selected = tensors.pop(f"{block}dex.head_mask", torch.ones(heads.shape[1])).double().reshape(-1, 1)
    folded = heads - lam * selected * (heads @ mixing)
    tensors[f"{block}o_proj.weight"] = folded.flatten(1).to(weight.dtype)
    if f"{block}o_proj.bias" in tensors:
        bias = tensors[f"{block}o_proj.bias"]
        lost = lam * (heads @ shift @ selected.flatten())
        tensors[f"{block}o_proj.bias"] = (bias.double() - lost).to(bias.dtype)


if __name__ == "__main__":
    fold(Path(sys.argv[1]), Path(sys.argv[2]))

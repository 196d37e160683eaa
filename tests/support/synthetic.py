"""Random checkpoints of any size, for measurements that depend on size and not on weights.

python -m tests.support.synthetic diffllama-6gb --gigabytes 6
python -m tests.support.synthetic motif --preset motif-2-12.7b --shards 6
"""

import json
import zlib
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant.checkpoints.atomic_folder import stage_output
from diffquant.checkpoints.folder import INDEX
from diffquant.checkpoints.row_stream import ConversionJob, RowBlock, Shard, shard_names, write_shards
from diffquant.checkpoints.writer import OutputTensor, ShardFile
from diffquant.errors import UsageError
from diffquant.model.adapters import adapter_for
from diffquant.model.blocks import Shape
from diffquant.support.files import write_atomically
from diffquant.support.names import did_you_mean
from diffquant.support.progress import Progress, progress_for, report_nothing

_LAYER: dict[str, Any] = json.loads("""{
 "model_type": "diffllama", "architectures": ["DiffLlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": 32000,
 "hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 64,
 "rms_norm_eps": 1e-05, "max_position_embeddings": 4096, "tie_word_embeddings": false, "attention_bias": false,
 "hidden_act": "silu"
}""")
PRESETS: dict[str, dict[str, Any]] = {
    "motif-2-12.7b": json.loads("""{
 "model_type": "Motif", "architectures": ["MotifForCausalLM"], "dtype": "bfloat16", "vocab_size": 219520,
 "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 40, "num_attention_heads": 40,
 "num_noise_heads": 8, "num_key_value_heads": 16, "k_ratio": 1, "head_dim": 128, "hidden_act": "poly_norm",
 "rms_norm_eps": 1e-06, "attn_rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "tie_word_embeddings": false
}"""),
    "motif-3": json.loads("""{
 "model_type": "Motif", "architectures": ["MotifForCausalLM"], "dtype": "bfloat16", "vocab_size": 220160,
 "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 53, "num_attention_heads": 80,
 "num_key_value_heads": 16, "num_noise_heads": 16, "head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 128,
 "q_lora_rank": 1024, "kv_lora_rank": 512, "attention_cls": "gdla", "diff_v2": true,
 "elementwise_attn_output_gate": true, "moe_intermediate_size": 1280, "num_experts": 384, "experts_top_k": 8,
 "num_shared_experts": 1, "n_dense_first_layers": 2, "score_func": "sigmoid", "route_norm": true, "route_scale": 2.0,
 "load_balance_coeff": 0.0001, "hidden_act": "poly_norm", "polynorm_output_scale": 0.5, "polynorm_bias_clamp": 0.5,
 "hidden_clamp": 1000000.0, "rms_norm_eps": 1e-05, "mhc_enabled": true, "mhc_expansion_rate": 4,
 "use_sliding_window": true, "sliding_window": 128, "sliding_window_pattern": "interleave",
 "sliding_window_period": 4, "rope_theta": 10000.0, "swa_rope_theta": 10000.0, "max_position_embeddings": 262144,
 "original_seq_len": 4096, "rope_factor": 64, "mscale": 1.0,
 "rope_scaling": {"rope_type": "yarn", "factor": 64, "original_max_position_embeddings": 4096,
  "beta_fast": 32, "beta_slow": 1, "mscale": 1, "rope_theta": 10000.0, "apply_yarn_scaling": false},
 "num_nextn_predict_layers": 1, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": false
}"""),
}


def sized_diffllama(gigabytes: float) -> dict[str, Any]:
    """Config of a DiffLlama of about this many times 10^9 bytes in bfloat16, by its number of layers."""
    return _LAYER | {"num_hidden_layers": _layers_for(gigabytes * 1e9)}


def preset(name: str) -> dict[str, Any]:
    """Config of a published model by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r}{did_you_mean(name, list(PRESETS))}")
    return PRESETS[name]


def synthesize(folder: Path, config: dict[str, Any], shards: int = 4, progress: Progress = report_nothing) -> None:
    """Write a random bfloat16 checkpoint of a config, its tensors spread over some files.

    Raises:
        DiffQuantError: no adapter reads the config, or the folder is there already.
    """
    shapes = adapter_for(config).source_shapes()
    outputs = [OutputTensor(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    total = sum(output.nbytes for output in outputs)
    jobs = [random_job(output) for output in outputs]
    with stage_output(
        folder, {"verb": "synthesize", "config": config, "shards": shards}, total, overwrite=False
    ) as staging:
        write_shards(_spread(jobs, shards, total), staging, total, progress)
        write_atomically(staging.folder / "config.json", json.dumps(config, indent=2) + "\n")


def write_holes(folder: Path, config: dict[str, Any], shards: int) -> None:
    """Write a config's names and shapes, the tensors as holes of sparse files, which read as zeros and take no disk.

    Raises:
        DiffQuantError: no adapter reads the config.
        FileExistsError: the folder is there already.
    """
    outputs = [OutputTensor(name, torch.bfloat16, shape) for name, shape in adapter_for(config).source_shapes().items()]
    parts = _spread([random_job(output) for output in outputs], shards, sum(output.nbytes for output in outputs))
    folder.mkdir()
    names = shard_names(len(parts))
    for name, part in zip(names, parts, strict=True):
        with closing(ShardFile(folder / name, part.outputs)):
            pass
    weight_map = {output.name: name for name, part in zip(names, parts, strict=True) for output in part.outputs}
    write_atomically(folder / INDEX, json.dumps({"weight_map": weight_map}))
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def random_job(output: OutputTensor) -> ConversionJob:
    """Job that makes a tensor's rows as they are written, the same for the same name every time.

    Norms are one, anything else is normal with a deviation of 0.02.
    """
    rows = output.shape[0]
    width = output.nbytes // output.dtype.itemsize // rows

    def make(first: int, last: int) -> RowBlock:
        if "norm" in output.name:
            return RowBlock({output.name: (first, torch.ones(last - first, dtype=output.dtype))})
        generator = torch.Generator().manual_seed(zlib.crc32(f"{output.name} {first}".encode()))
        values = torch.randn((last - first, *output.shape[1:]), generator=generator) * 0.02
        return RowBlock({output.name: (first, values.to(output.dtype))})

    return ConversionJob(output.name, rows, width, (output,), make)


def _layers_for(nbytes: float) -> int:
    def size(layers: int) -> int:
        return 2 * sum(map(_elements, adapter_for(_LAYER | {"num_hidden_layers": layers}).source_shapes().values()))

    layer = size(2) - size(1)
    return max(1, round((nbytes - size(1)) / layer) + 1)


def _elements(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _spread(jobs: list[ConversionJob], shards: int, total: int) -> list[Shard]:
    """Files of about equal size that the jobs fill in order."""
    filled: list[list[ConversionJob]] = [[] for _ in range(shards)]
    before = 0
    for job in jobs:
        filled[min(shards - 1, before * shards // total)].append(job)
        before += job.outputs[0].nbytes
    return [Shard(None, tuple(part)) for part in filled if part]


def main(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    gigabytes: Annotated[float, typer.Option(help="Size of its tensors, about, where it is a DiffLlama.")] = 6.0,
    model: Annotated[str | None, typer.Option("--preset", help=f"Another model: {', '.join(PRESETS)}.")] = None,
    shards: Annotated[int, typer.Option(min=1, help="Files to spread them over.")] = 4,
) -> None:
    """Write a random checkpoint."""
    synthesize(folder, preset(model) if model else sized_diffllama(gigabytes), shards, progress_for("synthesize"))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)

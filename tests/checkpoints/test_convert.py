import math

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, OutputExistsError, UsageError
from diffquant.quantization.conversion import convert
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import contents, edit_json, set_number, write_diffllama, write_llama, write_random
from tests.support.gguf_files import write_gguf

HEAD = 8
UNILM_V1 = {"model_type": "diff_v1", "vocab_size": 20, "hidden_size": 48, "intermediate_size": 56}
UNILM_V1 |= {"num_hidden_layers": 2, "num_attention_heads": 12, "head_dim": HEAD, "rms_norm_eps": 1e-5}


def angles(length):
    frequency = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequency


def rotated(x, style):
    """Rotary embedding of [T, H, d]: of neighbours, or of the two halves."""
    turn = angles(len(x))[:, None]
    first, second = (x[..., 0::2], x[..., 1::2]) if style == "interleaved" else x.chunk(2, -1)
    parts = first * turn.cos() - second * turn.sin(), first * turn.sin() + second * turn.cos()
    return torch.stack(parts, -1).flatten(-2) if style == "interleaved" else torch.cat(parts, -1)


def unilm_v1(x, w, layer, kv_pairs, style, pairing):
    """arXiv 2410.05258, equations 1 to 4, with unilm's head order; x [T, D] in float64."""
    pairs = 6
    q = rotated((x @ w["q_proj.weight"].T + w.get("q_proj.bias", 0)).unflatten(-1, (2 * pairs, HEAD)), style)
    k = rotated((x @ w["k_proj.weight"].T + w.get("k_proj.bias", 0)).unflatten(-1, (2 * kv_pairs, HEAD)), style)
    v = (x @ w["v_proj.weight"].T + w.get("v_proj.bias", 0)).unflatten(-1, (kv_pairs, 2 * HEAD))
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    lam = (w["lambda_q1"] @ w["lambda_k1"]).exp() - (w["lambda_q2"] @ w["lambda_k2"]).exp() + start
    future = torch.ones(len(x), len(x)).triu(1).bool()
    outputs = []
    for j in range(pairs):
        maps = []
        for m in range(2):
            # flash pairs K heads before repeating them, plain after.
            key = 2 * (j * kv_pairs // pairs) + m if pairing == "flash" else (2 * j + m) * kv_pairs // pairs
            logits = q[:, 2 * j + m] @ k[:, key].T / math.sqrt(HEAD)
            maps.append(logits.masked_fill(future, -torch.inf).softmax(-1))
        y = (maps[0] - lam * maps[1]) @ v[:, j * kv_pairs // pairs]
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["subln.weight"]
        outputs.append((1 - start) * y)
    return torch.cat(outputs, -1) @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


def stock_attention(folder, layer, x):
    """transformers' own DiffLlama attention of a layer, on float64 weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    turn = torch.cat([angles(len(x))] * 2, -1)[None]
    mask = torch.full((len(x), len(x)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    return model.model.layers[layer].self_attn(x[None], (turn.cos(), turn.sin()), mask)[0][0]


@pytest.mark.parametrize("pairing", ["flash", "plain"])
@pytest.mark.parametrize("kv_heads", [12, 4, 2], ids=["mha", "gqa3", "gqa6"])
@pytest.mark.parametrize(("style", "bias"), [("interleaved", False), ("half", True)], ids=["interleaved", "half-bias"])
def test_unilm_v1_becomes_the_diffllama_of_its_equations(tmp_path, kv_heads, pairing, style, bias):
    sizes = {"num_key_value_heads": kv_heads, "gqa_pairing": pairing, "rope_style": style, "attention_bias": bias}
    tensors = write_random(tmp_path / "unilm", UNILM_V1 | sizes)
    convert(tmp_path / "unilm", tmp_path / "out", "diffllama")
    x = torch.randn(7, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        expected = unilm_v1(x, weights, layer, kv_heads // 2, style, pairing)
        # transformers computes the softmax and λ in float32; a wrong order of heads or rows is off by about 1.
        torch.testing.assert_close(stock_attention(tmp_path / "out", layer, x), expected, rtol=0, atol=2e-6)


def test_an_eps_that_diffllama_cannot_have_is_refused(tmp_path):
    write_random(tmp_path / "unilm", UNILM_V1 | {"num_key_value_heads": 4, "rms_norm_eps": 1e-6})
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is 1e-06, and subln's 1e-05"):
        convert(tmp_path / "unilm", tmp_path / "out", "diffllama")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_llama_becomes_a_diff_v2_whose_maps_start_equal(tmp_path, kv_heads, bias):
    source = write_llama(tmp_path / "llama", num_key_value_heads=kv_heads, attention_bias=bias, shard_size="100KB")
    convert(source, tmp_path / "out", "diff-v2")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    spec = open_source(tmp_path / "out").spec
    assert (spec.pairs, spec.kv_pairs, spec.rope, spec.attention_name) == (4, kv_heads, "half", "DIFF V2")
    for name in after.tensors:
        made = after.read(name)
        if "lambda_proj" in name:
            assert made.shape == (4, 64)
            assert not made.any()
        elif ".q_proj." in name:
            first, second = made.unflatten(0, (4, 2, 16)).unbind(1)
            assert torch.equal(first.flatten(0, 1), before.read(name))
            assert torch.equal(second, first)
        else:
            factor = 2 if name.endswith("o_proj.weight") else 1
            assert torch.equal(made, factor * before.read(name))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(list(source.glob("*.safetensors"))) > 1


def test_a_doubling_that_overflows_float16_is_refused(tmp_path):
    source = write_llama(tmp_path / "llama", dtype=torch.float16)
    set_number(source, "model.layers.1.self_attn.o_proj.weight", (0, 0), 4e4)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj\.weight has values up to 8.*overflow"):
        convert(source, tmp_path / "out", "diff-v2")
    assert [entry.name for entry in tmp_path.iterdir()] == ["llama"]


def test_other_ways_are_refused_with_those_that_exist(tmp_path):
    source = write_diffllama(tmp_path / "model")
    with pytest.raises(
        UsageError, match="cannot convert diffllama to diff-v2 exactly; choose from diff_v1 to diffllama"
    ):
        convert(source, tmp_path / "out", "diff-v2")
    with pytest.raises(UsageError, match="cannot convert to 'mamba'; choose from diffllama, diff-v2"):
        convert(source, tmp_path / "out", "mamba")


def test_a_quantized_source_is_refused(tmp_path):
    quantize(write_llama(tmp_path / "llama"), tmp_path / "small", Recipe.of(weights="8:row"))
    with pytest.raises(CheckpointError, match="is quantized; convert its 16-bit original"):
        convert(tmp_path / "small", tmp_path / "out", "diff-v2")


def test_a_source_whose_quantization_config_is_null_is_of_16_bits(tmp_path):
    edit_json(write_llama(tmp_path / "llama") / "config.json", quantization_config=None)
    convert(tmp_path / "llama", tmp_path / "out", "diff-v2")
    assert not open_source(tmp_path / "out").has_only_cache_scales


@pytest.mark.parametrize("to", ["diff-v2", "rotated"])
def test_an_interrupted_conversion_goes_on_to_the_same_bytes_and_is_replaced_only_if_asked(tmp_path, to):
    source = write_llama(tmp_path / "llama", shard_size="100KB")
    convert(source, tmp_path / "expected", to)

    def interrupt(done, total, what):
        if done > 0.6 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="finished files are kept"):
        convert(source, tmp_path / "out", to, progress=interrupt)
    convert(source, tmp_path / "out", to)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    with pytest.raises(OutputExistsError):
        convert(source, tmp_path / "out", to)
    convert(source, tmp_path / "out", to, overwrite=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_another_dtype_does_not_take_over_an_interrupted_runs_shards(tmp_path):
    source = write_llama(tmp_path / "llama", shard_size="100KB")
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        # By itself each matrix keeps its own dtype.
        narrow = {name: tensor.bfloat16() for name, tensor in tensors.items() if "embed_tokens" in name}
        save_file(tensors | narrow, shard, metadata={"format": "pt"})

    def interrupt(done, total, _what):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="finished files are kept"):
        convert(source, tmp_path / "out", "diff-v2", progress=interrupt)
    convert(source, tmp_path / "out", "diff-v2", dtype="bfloat16")
    written = open_checkpoint(tmp_path / "out").tensors.values()
    assert {info.dtype for info in written if len(info.shape) == 2} == {torch.bfloat16}


def test_a_gguf_without_a_tokenizer_is_refused_before_work(tmp_path, monkeypatch):
    source = write_llama(tmp_path / "llama")
    monkeypatch.setattr(GGUFWriter, "add_token_list", lambda self, tokens: None)
    write_gguf(tmp_path / "tiny.gguf", source)
    with pytest.raises(CheckpointError, match=r"cannot read the tokenizer in .*tiny\.gguf"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out", "diff-v2")
    assert not (tmp_path / "out.partial").exists()

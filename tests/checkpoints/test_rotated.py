import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffquant.errors import CheckpointError, NonFiniteError
from diffquant.quantization.conversion import convert
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import set_number, write_checkpoint, write_llama
from tests.support.gguf_files import write_gguf
from tests.support.models import random_ids

# 96 is no power of two, and neither are heads of 12.
ODD = {"hidden_size": 96, "intermediate_size": 88, "head_dim": 12, "num_attention_heads": 8}
CHANNEL = 7
WEIGHTS = "model.safetensors"


def is_norm(name):
    return "norm" in name or "subln" in name


def write_source(folder, source, large=1.0, **changes):
    """A random checkpoint with norms far from 1; a channel of the residual stream and one of values are `large`."""
    write_checkpoint(folder, source, **changes)
    tensors = load_file(folder / WEIGHTS)
    generator = torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        if is_norm(name):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 3 - 1)
        elif name.endswith(("v_proj.weight", "o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor[CHANNEL] *= large
        elif name.endswith(("q_proj.weight", "gate_proj.weight")):
            tensor[:, CHANNEL] *= large
    tensors["model.embed_tokens.weight"][:, CHANNEL] *= large
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@torch.no_grad()
def assert_same_logits(before, after):
    ids = random_ids()
    expected, made = before(ids).logits.double(), after(ids).logits.double()
    # The models compute norms and softmax in float32; a wrong matrix is off by about 1.
    torch.testing.assert_close(made, expected, rtol=0, atol=float(2e-5 * expected.std()))


def peak(x, dim):
    """Largest magnitude along an axis over the root mean square."""
    return float((x.abs().amax(dim) / x.square().mean(dim).sqrt()).mean())


@pytest.mark.parametrize("source", ["llama", "diffllama"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "changes",
    [ODD | {"num_key_value_heads": 4, "attention_bias": True}, {"num_key_value_heads": 4}],
    ids=["odd-gqa-bias", "powers-of-two"],
)
def test_stock_transformers_computes_the_same_logits(tmp_path, source, tied, changes):
    write_source(tmp_path / "source", source, tie_word_embeddings=tied, **changes)
    convert(tmp_path / "source", tmp_path / "out", "rotated")
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64, attn_implementation="eager")
        for name in ("source", "out")
    )
    assert type(before) is type(after)
    assert not after.config.tie_word_embeddings
    assert_same_logits(before, after)


@pytest.mark.parametrize(
    "source", ["unilm-v1", "unilm-v1-plain", "unilm-v2", "unilm-v2-half", "gated", "motif", "motif-grouped"]
)
def test_the_familys_other_models_compute_the_same_logits(tmp_path, source):
    write_source(tmp_path / "source", source)
    made = convert(tmp_path / "source", tmp_path / "out", "rotated")
    before, after = (load(tmp_path / name, dtype=torch.float64) for name in ("source", "out"))
    assert_same_logits(before, after)
    assert ("values are not rotated" in made.summary()) == (source == "gated")
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    assert all((tensor == 1).all() for name, tensor in tensors.items() if is_norm(name))


@pytest.mark.parametrize(("source", "is_spread"), [("unilm-v1", True), ("unilm-v2", True), ("gated", False)])
def test_a_large_channel_of_values_is_spread_over_its_head(tmp_path, source, is_spread):
    write_source(tmp_path / "source", source, large=30)
    convert(tmp_path / "source", tmp_path / "out", "rotated")
    value = "model.layers.1.self_attn.v_proj.weight"
    before, after = (peak(load_file(tmp_path / name / WEIGHTS)[value].norm(dim=1), 0) for name in ("source", "out"))
    assert (after < 0.8 * before) == is_spread


def test_a_large_channel_of_the_residual_stream_is_spread(tmp_path):
    write_source(tmp_path / "source", "diffllama", large=30)
    convert(tmp_path / "source", tmp_path / "out", "rotated")
    before, after = (
        load(tmp_path / name, dtype=torch.float32)(random_ids(), output_hidden_states=True).hidden_states[2]
        for name in ("source", "out")
    )
    # All of it in one of 64 channels is a peak of 8; spread by a Hadamard matrix, it is 1.
    assert peak(before, -1) > 6
    assert peak(after, -1) < 3


def test_weights_with_a_large_input_channel_lose_less_by_rounding_once_rotated(tmp_path):
    write_source(tmp_path / "source", "unilm-v1", large=30)
    convert(tmp_path / "source", tmp_path / "out", "rotated")
    recipe = Recipe.of(weights="4:row")
    before, after = (
        {each.name: each.error for each in quantize(tmp_path / name, tmp_path / f"{name}-4", recipe).errors}
        for name in ("source", "out")
    )
    # The large channel alone sets the source's scales, and the other 63 round to 0.
    gate = "model.layers.1.mlp.gate_proj.weight"
    assert after[gate] < 0.5 * before[gate]


def test_what_is_rotated_is_written_in_float32_unless_another_dtype_is_given(tmp_path):
    source = write_source(tmp_path / "source", "unilm-v1-plain", dtype=torch.bfloat16)
    exact = convert(source, tmp_path / "out", "rotated")
    narrow = convert(source, tmp_path / "narrow", "rotated", dtype="bfloat16")
    assert exact.rounding_error < 1e-6 < narrow.rounding_error
    wide = {name for name, tensor in load_file(tmp_path / "out" / WEIGHTS).items() if tensor.dtype == torch.float32}
    vectors = {name for name in wide if name.endswith("bias")}
    assert vectors == {f"model.layers.{i}.self_attn.{name}.bias" for i in range(2) for name in ("v_proj", "out_proj")}
    assert {tensor.dtype for tensor in load_file(tmp_path / "narrow" / WEIGHTS).values()} == {torch.bfloat16}


def test_a_gguf_file_is_rotated(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama"))
    convert(tmp_path / "tiny.gguf", tmp_path / "out", "rotated", dtype="float32")
    assert_same_logits(*(load(tmp_path / name, dtype=torch.float64) for name in ("tiny.gguf", "out")))


@pytest.mark.parametrize("source", ["phi4flash", "motif3"])
def test_layers_that_read_the_residual_stream_otherwise_are_refused(tmp_path, source):
    write_checkpoint(tmp_path / "source", source)
    with pytest.raises(CheckpointError, match=r"with layers of .*: convert \(to='rotated'\) does not support it yet"):
        convert(tmp_path / "source", tmp_path / "out", "rotated")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "place"), [("model.norm.weight", (9,)), ("model.layers.1.mlp.down_proj.weight", (0, 9))]
)
def test_nan_is_named(tmp_path, name, place):
    source = write_llama(tmp_path / "llama")
    set_number(source, name, place, float("nan"))
    with pytest.raises(NonFiniteError, match=name.replace(".", r"\.")):
        convert(source, tmp_path / "out", "rotated")

import json
import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diffquant import export
from diffquant.checkpoints import gguf as gguf_format
from diffquant.checkpoints.gguf import GgufCheckpoint
from diffquant.checkpoints.gguf_header import read_header
from diffquant.checkpoints.gguf_rope import rope_parameters
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.checkpoints import write_llama
from tests.support.gguf_files import write_gguf
from tests.support.tables import in_one_test

# What transformers adds to every config; none of it describes the model.
NOT_OF_THE_MODEL = {
    *("quantization_config", "transformers_version", "output_hidden_states", "output_attentions", "return_dict"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type"),
}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("wide") / "llama", num_key_value_heads=2, **WIDE)


@pytest.fixture
def tiny(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama"))


def bits(tensor):
    """NaN equals itself here."""
    return tensor.view(torch.int32)


@in_one_test("kind", KINDS)
def test_every_tensor_and_the_config_are_those_of_transformers(tmp_path, wide_llama, kind):
    path = write_gguf(tmp_path / "model.gguf", wide_llama, GGMLQuantizationType[kind])
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    checkpoint = GgufCheckpoint(path)
    expected = oracle.state_dict()
    assert list(checkpoint.tensors) == list(expected)
    assert all(torch.equal(bits(checkpoint.read(name)), bits(tensor)) for name, tensor in expected.items())
    described = {
        key: value
        for key, value in oracle.config.to_dict().items()
        if key not in NOT_OF_THE_MODEL and not key.startswith("_") and value is not None
    }
    assert checkpoint.config == described | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}


@in_one_test("unsaid", ["add_head_count_kv", "add_rope_dimension_count", "add_layer_norm_rms_eps"])
def test_what_a_file_leaves_out_is_what_transformers_fills_in(tmp_path, monkeypatch, unsaid):
    for writer in {unsaid, "add_context_length", "add_rope_freq_base", "add_vocab_size", "add_bos_token_id"}:
        monkeypatch.setattr(GGUFWriter, writer, lambda self, value: None)
    write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama", num_key_value_heads=4))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").config.to_dict()
    config = GgufCheckpoint(tmp_path / "tiny.gguf").config
    assert config == {key: oracle[key] for key in config} | {"dtype": "float32", "architectures": ["LlamaForCausalLM"]}


def test_the_weights_type_is_that_of_most_matrices_also_where_the_embedding_has_more_bytes(tmp_path):
    tiny_lm.llama(intermediate_size=32).save_pretrained(tmp_path / "llama")
    tiny_lm.tokenizer().save_pretrained(tmp_path / "llama")
    export(tmp_path / "llama", tmp_path / "low.gguf", to="gguf", weights="4:g32", embed=8)
    stored = read_header(memoryview((tmp_path / "low.gguf").read_bytes()))[1]
    assert stored["token_embd.weight"].kind.name == "Q8_0"
    assert GgufCheckpoint(tmp_path / "low.gguf").earlier_format == "Q4_0"


def test_a_head_that_is_the_embedding_is_tied(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama", tie_word_embeddings=True))
    source = open_source(tmp_path / "tiny.gguf")
    assert source.architecture.tie_word_embeddings
    assert "lm_head.weight" not in source.checkpoint.tensors


def test_the_header_is_what_ggufs_own_reader_finds(tiny):
    (metadata, tensors, _), oracle = read_header(memoryview(tiny.read_bytes())), GGUFReader(tiny)
    assert {name: (t.kind, t.shape, t.start, t.nbytes) for name, t in tensors.items()} == {
        t.name: (t.tensor_type, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in oracle.tensors
    }
    fields = {name: field for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert metadata.keys() == fields.keys()
    for name, value in metadata.items():
        contents = fields[name].contents()
        if isinstance(contents, list):
            contents = len(contents) if isinstance(contents[0], str) else tuple(contents)
        assert value == contents


def test_rows_are_those_of_the_whole_tensor(tiny):
    checkpoint = GgufCheckpoint(tiny)
    picked = torch.tensor([5, 0, 5, 31])
    assert checkpoint.tensors
    for name in checkpoint.tensors:
        whole = checkpoint.read(name)
        assert torch.equal(checkpoint.read_rows(name, slice(3, 17)), whole[3:17])
        assert torch.equal(checkpoint.read_rows(name, picked), whole[picked])


def test_a_file_cut_anywhere_is_refused(tiny, tmp_path):
    whole = tiny.read_bytes()
    for length in (0, 3, 7, 40, 700, len(whole) // 2, len(whole) - 200):
        tiny.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cannot read .*tiny\.gguf: "):
            GgufCheckpoint(tiny)


def test_arrays_within_arrays_without_end_are_damage():
    array = struct.pack("<IQ", 9, 1)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + 5000 * array
    with pytest.raises(CheckpointError, match="its header is cut off or damaged"):
        read_header(memoryview(data))


def test_every_tensor_beyond_the_end_is_named(tiny):
    data = tiny.read_bytes()
    start = read_header(memoryview(data))[1]["blk.2.ffn_down.weight"].start
    tiny.write_bytes(data[: start + 5])
    with pytest.raises(CheckpointError, match=r"before data of .*blk\.2\.ffn_down\.weight"):
        GgufCheckpoint(tiny)


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no\.gguf does not exist"):
        GgufCheckpoint(tmp_path / "no.gguf")


def test_another_architecture_is_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "other.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'qwen2', but only GGUF files of Llamas"):
        GgufCheckpoint(tmp_path / "other.gguf")


def test_a_type_that_gguf_does_not_know_is_named(tiny):
    data = bytearray(tiny.read_bytes())
    place = data.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 16
    data[place : place + 4] = (999).to_bytes(4, "little")
    tiny.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight has type 999, which this gguf does not support"):
        GgufCheckpoint(tiny)


def test_a_type_that_is_not_dequantized_is_named(tiny, monkeypatch):
    monkeypatch.setattr(gguf_format, "_is_dequantized", lambda kind: kind.name != "Q8_0")
    with pytest.raises(
        CheckpointError, match=r"cannot dequantize these types: output\.weight is Q8_0, .* and \d+ more"
    ):
        GgufCheckpoint(tiny)


def test_a_tensor_that_no_llama_has_is_refused(tmp_path, monkeypatch):
    add = GGUFWriter.add_tensor

    def add_with_bias(self, name, data, **options):
        add(self, name, data, **options)
        if name == "output_norm.weight":
            add(self, "blk.0.attn_q.bias", data)

    monkeypatch.setattr(GGUFWriter, "add_tensor", add_with_bias)
    path = write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama"))
    with pytest.raises(CheckpointError, match=r"not part of the model: blk\.0\.attn_q\.bias"):
        open_source(path)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def librarys_divisors(settings, head_dim=64, theta=500000.0):
    """What transformers' scaling of Llama 3 divides each frequency by."""
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": theta} | settings,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return (1 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim)) / scaled).tolist()


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("factor", [8.0, 32.0, 1.5])
@pytest.mark.parametrize("original", [8192, 2048, 16384])
def test_the_settings_behind_the_divisors_are_found_again(head_dim, factor, original):
    settings = LLAMA3 | {"factor": factor, "original_max_position_embeddings": original}
    found = rope_parameters({"llama.rope.freq_base": 5e5}, np.array(librarys_divisors(settings, head_dim)))
    assert found == {"rope_theta": 5e5, "rope_type": "llama3"} | settings


PAIRS = 8
UNREAD_DIVISORS = {
    "of two models": ([1.0, 1.0, 1.2, 1.5, 6.0, 8.0, 32.0, 32.0], "no known scaling of Llama 3"),
    "not in order": ([1.0, 8.0] * 4, "no known scaling of Llama 3"),
    "not positive": ([1.0] * 7 + [0.0], "not positive"),
    "not finite": ([1.0] * 7 + [float("nan")], "not positive"),
    "of another width": ([1.0] * 7, "has 7 numbers for the 8 pairs of channels"),
}


@in_one_test(("divisors", "message"), UNREAD_DIVISORS.values())
def test_divisors_that_no_scaling_gives_are_refused(tmp_path, divisors, message):
    folder = write_llama(tmp_path / "llama")
    path = write_gguf(tmp_path / "tiny.gguf", folder, tensors={"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match=rf"rope_freqs\.weight .*{message}"):
        GgufCheckpoint(path)


@in_one_test("theta", [0.0, -1.0, 1.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_divisors_under_a_base_that_gives_no_angles_are_refused(theta):
    divisors = np.array(librarys_divisors(LLAMA3))
    with pytest.raises(CheckpointError, match=r"freq_base is|no known scaling of Llama 3"):
        rope_parameters({"llama.rope.freq_base": theta}, divisors)


def test_divisors_of_llama_3_1_and_3_2_together_are_refused():
    first, second = librarys_divisors(LLAMA3, 128), librarys_divisors(LLAMA3 | {"factor": 32.0}, 128)
    with pytest.raises(CheckpointError, match="the 64 frequency divisors in"):
        rope_parameters({"llama.rope.freq_base": 5e5}, np.array(first[:33] + second[33:]))


# Key, value, and what the message names.
UNREAD = [
    ("llama.attention.causal", False, "llama.attention.causal is False"),
    ("llama.attention.head_count", [4, 2, 4], r"llama.attention.head_count differs from layer to layer: \[4, 2, 4\]"),
    ("llama.attention.key_length", 8, "llama.rope.dimension_count is 16, llama.attention.key_length is 8"),
    ("llama.attention.value_length", 8, "llama.attention.value_length is 8"),
    ("llama.attention.scale", 0.5, "llama.attention.scale is 0.5"),
    ("llama.attention.sliding_window", 4096, "llama.attention.sliding_window is 4096"),
    ("llama.attn_logit_softcapping", 50.0, "llama.attn_logit_softcapping is 50.0"),
    ("llama.expert_count", 8, "llama.expert_count is 8"),
    ("llama.feed_forward_length", [96, 80, 96], "llama.feed_forward_length differs"),
    ("llama.logit_scale", 0.5, "llama.logit_scale is 0.5"),
    ("llama.nextn_predict_layers", 1, "llama.nextn_predict_layers is 1"),
    ("llama.rope.scaling.attn_factor", 0.5, "llama.rope.scaling.attn_factor is 0.5"),
    ("llama.rope.scaling.type", "longrope", "llama.rope.scaling.type is 'longrope'"),
    ("llama.rope.dimension_count", "16", "rope_freqs.weight has 8 numbers for the 0 pairs"),
    ("llama.rope.scaling.factor", "4", "llama.rope.scaling.factor is '4'"),
    ("llama.rope.scaling.yarn_beta_fast", 8.0, "llama.rope.scaling.yarn_beta_fast is 8.0"),
    ("llama.rope.scaling.yarn_log_multiplier", 0.5, "llama.rope.scaling.yarn_log_multiplier is 0.5"),
    ("llama.something.new", 1, "llama.something.new is 1; .*gguf-new-metadata --remove-metadata"),
    ("general.type", "adapter", "general.type is 'adapter'"),
    ("general.alignment", 0, "general.alignment is 0"),
    ("split.count", 3, "one of 3 parts"),
]


@in_one_test(("key", "value", "message"), UNREAD)
def test_a_key_that_is_not_computed_is_named(tmp_path, key, value, message):
    tensors = {"rope_freqs.weight": [1.0] * PAIRS} if key == "llama.rope.dimension_count" else {}
    path = write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama"), metadata={key: value}, tensors=tensors)
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: .*{message}"):
        GgufCheckpoint(path)


def test_two_scalings_of_angles_at_once_are_refused(tmp_path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    divisors = {"rope_freqs.weight": [1.0, 1.0, 1.0, 1.0, 8.0, 8.0, 8.0, 8.0]}
    path = write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama"), metadata=scaling, tensors=divisors)
    with pytest.raises(CheckpointError, match=r"twice, by rope_freqs\.weight and by llama\.rope\.scaling\.type linear"):
        GgufCheckpoint(path)


def test_keys_that_change_nothing_are_taken(tmp_path):
    stated = {
        "llama.tensor_data_layout": "Meta AI original pth",
        "llama.attention.causal": True,
        "llama.expert_count": 0,
        "llama.rope.scaling.finetuned": True,
        "llama.logit_scale": 1.0,
        # A factor of 0 is none, as in llama.cpp.
        "llama.rope.scaling.factor": 0.0,
    }
    folder = write_llama(tmp_path / "llama")
    plain = GgufCheckpoint(write_gguf(tmp_path / "plain.gguf", folder))
    assert GgufCheckpoint(write_gguf(tmp_path / "stated.gguf", folder, metadata=stated)).config == plain.config


def test_every_token_that_ends_a_text_is_kept(tmp_path):
    stated = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 7}
    path = write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama"), metadata=stated)
    quantize(path, tmp_path / "out", Recipe.of(weights="8:row"))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == [2, 5, 7]


def test_what_a_file_gives_twice_is_named(tiny):
    data = tiny.read_bytes()
    for once, again in ((b"general.name", b"llama.context_length"), (b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight")):
        twice = data.replace(len(once).to_bytes(8, "little") + once, len(again).to_bytes(8, "little") + again)
        tiny.write_bytes(twice)
        with pytest.raises(CheckpointError, match=f"{again.decode()} more than once"):
            GgufCheckpoint(tiny)


@pytest.mark.parametrize("weights", ["4:g32", "8:tensor"])
def test_quantizing_reads_rows_and_never_a_whole_matrix(tiny, tmp_path, monkeypatch, weights):
    largest = []
    values = gguf_format._values

    def watched(data, kind):
        if data.ndim == 2:
            largest.append(len(data))
        return values(data, kind)

    monkeypatch.setattr(gguf_format, "_values", watched)
    monkeypatch.setattr("diffquant.checkpoints.row_stream.BLOCK_ELEMENTS", 640)
    quantize(tiny, tmp_path / "out", Recipe.of(weights=weights))
    assert 0 < max(largest) <= 64

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM

from diffquant.errors import CheckpointError
from diffquant.formats import gguf as gguf_format
from diffquant.formats.gguf import GgufCheckpoint
from diffquant.formats.gguf_header import read_header
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.source.source import open_source
from tests.support.checkpoints import write_llama
from tests.support.gguf_files import write_gguf

# What transformers adds to every config; none of it describes the model.
NOT_OF_THE_MODEL = {
    "quantization_config",
    "transformers_version",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("unsaid", ["add_head_count_kv", "add_rope_dimension_count", "add_layer_norm_rms_eps"])
def test_what_a_file_leaves_out_is_what_transformers_fills_in(tmp_path, monkeypatch, unsaid):
    for writer in {unsaid, "add_context_length", "add_rope_freq_base", "add_vocab_size", "add_bos_token_id"}:
        monkeypatch.setattr(GGUFWriter, writer, lambda self, value: None)
    write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama", num_key_value_heads=4))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").config.to_dict()
    config = GgufCheckpoint(tmp_path / "tiny.gguf").config
    assert config == {key: oracle[key] for key in config} | {"dtype": "float32", "architectures": ["LlamaForCausalLM"]}


def test_a_head_that_is_the_embedding_is_tied(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama", tie_word_embeddings=True))
    source = open_source(tmp_path / "tiny.gguf")
    assert source.architecture.tie_word_embeddings
    assert "lm_head.weight" not in source.checkpoint.tensors


def test_the_header_is_what_ggufs_own_reader_finds(tiny):
    header, oracle = read_header(memoryview(tiny.read_bytes())), GGUFReader(tiny)
    assert {name: (t.kind, t.shape, t.start, t.nbytes) for name, t in header.tensors.items()} == {
        t.name: (t.tensor_type, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in oracle.tensors
    }
    fields = {name: field for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for name, value in header.metadata.items():
        contents = fields[name].contents()
        assert value == (len(contents) if isinstance(contents, list) else contents)


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


def test_every_tensor_beyond_the_end_is_named(tiny):
    data = tiny.read_bytes()
    start = read_header(memoryview(data)).tensors["blk.2.ffn_down.weight"].start
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
    with pytest.raises(CheckpointError, match="architecture 'qwen2', and only a llama's"):
        GgufCheckpoint(tmp_path / "other.gguf")


def test_a_type_that_gguf_does_not_know_is_named(tiny):
    data = bytearray(tiny.read_bytes())
    place = data.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 16
    data[place : place + 4] = (999).to_bytes(4, "little")
    tiny.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight has type 999, which gguf does not know"):
        GgufCheckpoint(tiny)


def test_a_type_that_is_not_dequantized_is_named(tiny, monkeypatch):
    monkeypatch.setattr(gguf_format, "_is_dequantized", lambda kind: kind.name != "Q8_0")
    with pytest.raises(CheckpointError, match=r"no tensor of these types: .*blk\.0\.attn_q\.weight is Q8_0"):
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


@pytest.mark.parametrize("weights", ["4:g32", "8:tensor"])
def test_quantizing_reads_rows_and_never_a_whole_matrix(tiny, tmp_path, monkeypatch, weights):
    largest = []
    values = gguf_format._values

    def watched(data, kind):
        if data.ndim == 2:
            largest.append(len(data))
        return values(data, kind)

    monkeypatch.setattr(gguf_format, "_values", watched)
    monkeypatch.setattr("diffquant.formats.row_stream.BLOCK_ELEMENTS", 640)
    quantize(tiny, tmp_path / "out", Recipe.of(weights=weights))
    assert 0 < max(largest) <= 64

"""`load` gives, bit for bit, the weights that `quantize` stores with a recipe: for every rounding and family member."""

import pytest
import torch

from diffquant import Recipe, convert, load, quantize
from diffquant.checkpoints import row_stream
from diffquant.quantization import roundings
from diffquant.quantization.roundings import Rounder, Rounding, rounding_named
from tests.support import tiny_lm
from tests.support.checkpoints import write_diffllama, write_llama, write_random
from tests.support.thorough import sampled

UNILM = {"model_type": "diff_v1", "vocab_size": tiny_lm.WORDS, "hidden_size": 64, "intermediate_size": 96}
UNILM |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
UNILM |= {"rms_norm_eps": 1e-5}


def write_unilm(folder, pairing):
    write_random(folder, UNILM | {"gqa_pairing": pairing}, torch.bfloat16)


def write_diff_v2(folder, source):
    write_llama(source, torch.float16, vocab_size=tiny_lm.WORDS, num_key_value_heads=2)
    convert(source, folder, "diff-v2")


MEMBERS = {
    "diffllama": lambda folder: write_diffllama(folder, torch.bfloat16, vocab_size=tiny_lm.WORDS),
    "unilm-v1": lambda folder: write_unilm(folder, "flash"),
    "unilm-v1-repeated-kv": lambda folder: write_unilm(folder, "plain"),
    "diff-v2": lambda folder: write_diff_v2(folder, folder.with_name("llama-source")),
    "llama": lambda folder: write_llama(folder, torch.float32, vocab_size=tiny_lm.WORDS),
}
ROUNDINGS = {"nearest": "nearest", "mse": "mse", "gptq": {"name": "gptq", "tokens": 256, "window": 32}}


@pytest.fixture(scope="module", params=MEMBERS)
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family") / request.param
    MEMBERS[request.param](folder)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


def different(one, other):
    """Names of the parameters in which two models differ."""
    theirs = dict(other.named_parameters())
    return [name for name, parameter in one.named_parameters() if not torch.equal(parameter, theirs[name])]


@pytest.mark.parametrize("rounding", sampled(ROUNDINGS, 4))
def test_load_gives_the_weights_that_quantize_stores(source, tmp_path, rounding):
    recipe = Recipe.of(weights="4:g16", overrides={"*.mlp.up_proj": "6:row"}, rounding=ROUNDINGS[rounding])
    quantize(source, tmp_path / "low", recipe)
    stored, simulated = load(tmp_path / "low"), load(source, recipe)
    assert different(stored, simulated) == []
    if rounding != "nearest":
        assert len(different(simulated, load(source, Recipe.of(weights="4:g16")))) >= 14


class Telling(Rounding):
    """Codes that tell how many rows were rounded together, and on how many threads."""

    name = "telling"

    def prepare(self, source, schemes, settings, progress):
        def tell(name, values, scheme, dtype):
            codes = torch.full(values.shape, 8 * torch.get_num_threads() + len(values) % 8, dtype=torch.int8)
            return codes, torch.ones(len(values), 1, dtype=dtype)

        return Rounder(tell)


def test_neither_blocks_of_rows_nor_threads_come_between_them(tmp_path, monkeypatch):
    """The last bits of a product of matrices depend on both."""
    monkeypatch.setitem(roundings.ROUNDINGS, "telling", Telling())
    monkeypatch.setattr(row_stream, "BLOCK_ELEMENTS", 64 * 7)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        recipe = Recipe.of(weights="8:row", rounding="telling")
        quantize(write_llama(tmp_path / "source"), tmp_path / "low", recipe)
        stored, simulated = load(tmp_path / "low"), load(tmp_path / "source", recipe)
        assert different(stored, simulated) == []
        # 64 rows in blocks of 7, and one thread: 8 + 7 and, of the last row, 8 + 1.
        assert simulated.get_parameter("model.layers.0.self_attn.q_proj.weight").unique().tolist() == [9, 15]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_text_is_read_once_a_load_and_only_for_weights(tmp_path, monkeypatch):
    MEMBERS["llama"](tmp_path / "source")
    tiny_lm.tokenizer().save_pretrained(tmp_path / "source")
    gptq = type(rounding_named("gptq"))
    prepare, prepared = gptq.prepare, []
    monkeypatch.setattr(gptq, "prepare", lambda *given: prepared.append(1) or prepare(*given))
    load(tmp_path / "source", Recipe.of(weights="4:g16", rounding=ROUNDINGS["gptq"]))
    assert len(prepared) == 1
    load(tmp_path / "source", Recipe.of(kv=8, rounding=ROUNDINGS["gptq"]))
    assert len(prepared) == 1

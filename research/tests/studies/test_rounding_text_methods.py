"""Methods of the rounding contest that read a text: what they are shown of a model, and what they store."""

import re
from importlib.util import find_spec

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from research.studies import text_quantizers
from research.studies.rounded_model import RoundingOptions, Subject
from research.studies.rounding_method import TIERS, Method
from research.studies.text_quantizers import TEXT_METHODS
from tests.support import tiny_lm

OPTIONS = RoundingOptions(characters=1500, window=64, tokens=512, items=0)
NAMED = {method.name: method for method in TEXT_METHODS}


def installed(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the extra quantizers: {package}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_lm.write_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def subject(checkpoint):
    return Subject(checkpoint, OPTIONS)


def test_mean_squares_are_those_of_transformers_inputs(subject):
    oracle, squares = tiny_lm.llama(), {}
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = module.weight.data.half().float()
            module.register_forward_pre_hook(
                lambda _, args, name=name: squares.update({f"{name}.weight": args[0].square().mean((0, 1))})
            )
    with torch.inference_mode():
        oracle(subject._reading.windows)
    assert subject._reading.mean_squares.keys() == squares.keys() == {name for name, _ in subject._weights.values()}
    for name, expected in squares.items():
        torch.testing.assert_close(subject._reading.mean_squares[name], expected, rtol=1e-4, atol=1e-6)


def test_later_layers_read_what_replaced_weights_give_and_the_same_layer_does_not(subject):
    plain, replaced = {}, {}

    def silenced(name, weight, inputs):
        replaced[name] = inputs
        return torch.zeros_like(weight) if "layers.0" in name else None

    subject._reading.walk(lambda name, weight, inputs: plain.update({name: inputs}))
    subject._reading.walk(silenced)
    first, second = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    for name, inputs in replaced.items():
        assert torch.equal(inputs, plain[name]) == ("layers.0" in name)
    # A layer whose weights are zero passes its input on, which both norms bring to the same length.
    torch.testing.assert_close(replaced[second], replaced[first])


def test_a_missing_library_is_a_row_that_says_how_to_install_it(subject):
    def absent(_):
        raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")

    method = Method("llama.cpp Q4_0, imatrix", TIERS[0], absent, "llama-cpp-python")
    assert subject.measured(method, {}) == {"missing": "llama_cpp is not installed: pip install llama-cpp-python"}


def test_more_bits_go_where_llama_cpp_puts_them():
    # `use_more_bits` of src/llama-quant.cpp for SmolLM2's 30 layers: the first and last eighth, and each third between.
    assert [layer for layer in range(30) if text_quantizers._has_more_bits(layer, 30)] == (
        [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    )


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param("llama.cpp Q4_0, imatrix", 4.5, marks=installed("llama_cpp")),
        pytest.param("llama.cpp IQ4_NL, imatrix", 4.5, marks=installed("llama_cpp")),
        # Of the tiny model's 15,360 weights, the second layer's value and down projections have 6.5625 bits.
        pytest.param(
            "llama.cpp Q4_K_M, imatrix", 4.5 + 2.0625 * (16 * 32 + 32 * 48) / 15360, marks=installed("llama_cpp")
        ),
        pytest.param(
            "llm-compressor GPTQ, 4 bits, groups of 32, minmax", 4 + 16 * 448 / 15360, marks=installed("llmcompressor")
        ),
        pytest.param(
            "llm-compressor GPTQ, 3 bits, groups of 32, mse", 3 + 16 * 448 / 15360, marks=installed("llmcompressor")
        ),
    ],
)
def test_stored_bits_count_codes_scales_and_superblocks(subject, name, bits):
    row = subject.measured(NAMED[name], {})
    assert row["bits"] == pytest.approx(bits)


@installed("auto_round")
@torch.enable_grad()  # by which it tunes
def test_stored_bits_of_auto_round(subject, tmp_path):
    method = NAMED["AutoRound 4 bits, groups of 32"]
    assert re.match(r".*k_proj.weight: AutoRound left it in 16 bits", subject.measured(method, {})["missing"])
    tiny_lm.llama(key_heads=4).save_pretrained(tmp_path / "llama")
    tiny_lm.tokenizer().save_pretrained(tmp_path / "llama")
    row = Subject(tmp_path / "llama", OPTIONS).measured(method, {})
    # A width of 48 has two groups, the second of them half empty.
    assert row["bits"] == pytest.approx(4 + 16 * (4 * 32 + 2 * 48 + 2 * 32) / (4 * 32 * 32 + 3 * 32 * 48))
    assert 0 < row["kl"] < 1
    assert row["mean_relative_rms_error"] < 0.3


@installed("llama_cpp")
def test_a_width_that_no_block_divides_is_quantized_with_its_neighbours():
    torch.manual_seed(0)
    weight = torch.randn(8, 48).half()
    made = text_quantizers._ggml_quantized(text_quantizers._ggml(), "Q4_0", weight, torch.ones(48)).values
    # gguf's own quantizer, which knows no importance, of the same values in blocks of 32.
    kind = GGMLQuantizationType.Q4_0
    oracle = torch.from_numpy(dequantize(quantize(weight.float().numpy().reshape(4, 96), kind), kind)).view(8, 48)
    assert (made - weight).square().sum() <= (oracle - weight).square().sum()
    assert (made - weight).norm() < 0.12 * weight.float().norm()

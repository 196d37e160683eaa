"""Exports of the families beside V1 and V2, tokens as torch's: states, shared keys, latents, V3's gates."""

import numpy as np
import onnxruntime_genai as genai
import pytest
import torch

import diffquant
from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.errors import CheckpointError, ToleranceError
from diffquant.onnx import ExportOptions, Generator, export, verify
from diffquant.onnx.files import RANGES_FILE
from diffquant.onnx.runtime.session import InPlaceDecoder, OnnxModel
from diffquant.recipe import Recipe
from tests.export.test_running import by_the_example
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids
from tests.support.planted import PlantedExport
from tests.support.thorough import sampled

PROMPT = "It was a dark and stormy night, and the"
SIZES = {"vocab_size": tiny_lm.WORDS, "max_position_embeddings": 96}
# Widths that groups of 16 divide, and rows of a cache that GroupQueryAttention takes.
LATENTS = SIZES | {"hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 16, "q_lora_rank": 32}
LATENTS |= {"kv_lora_rank": 32, "qk_rope_head_dim": 8}
OWN_DECODERS = ["phi4flash", "motif3"]
FAMILIES = [*OWN_DECODERS, "gated"]
LOW = {"kv_bits": 8, "accuracy_level": 1}
NEW = 16


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return checkpoint_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=OWN_DECODERS)
def own_decoder(request, tmp_path_factory):
    return checkpoint_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    return checkpoint_of("phi4flash", tmp_path_factory.mktemp("phi"))


def checkpoint_of(name, root):
    folder = root / "model"
    write_checkpoint(folder, name, **(LATENTS if name == "motif3" else SIZES))
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


def exported(source, folder, **options):
    parsed = ExportOptions.parse(**options)
    ranges = calibrate_cache(source) if parsed.kv_bits < 16 else None
    export(source, folder, parsed, ranges=ranges)
    return folder


def torch_tokens(source, ids, recipe=None, scales=None):
    model = diffquant.load(source, recipe, dtype=torch.float32, scales=scales)
    made = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return made[0, len(ids) :].tolist()


def decoded(folder, ids):
    """Greedy tokens of a prefill and steps in place; no token ends them."""
    state = InPlaceDecoder(OnnxModel(folder, 1), 1, len(ids) + NEW)
    made = [int(state.step(np.array([ids]))[0, -1].argmax())]
    while len(made) < NEW:
        made.append(int(state.step(np.array([made[-1:]]))[0, -1].argmax()))
    return made


def test_a_float_export_is_proved_and_its_tokens_are_torchs(family, tmp_path):
    folder = exported(family, tmp_path / "out")
    assert verify(folder, family).passed
    generator = Generator(folder, 1)
    ids = generator.text.encode(PROMPT)
    wanted = torch_tokens(family, ids)
    assert decoded(folder, ids) == wanted
    made = list(generator.generate_tokens(ids, NEW))
    assert len(made) > 1
    assert made == wanted[: len(made)]


def test_four_bits_with_a_quantized_cache_are_proved_and_the_tokens_are_torchs(family, tmp_path):
    low = tmp_path / "low"
    diffquant.quantize(family, low, Recipe.of(weights="4:g16"))
    folder = exported(low, tmp_path / "out", **LOW)
    assert verify(folder, low).passed
    ids = Generator(folder, 1).text.encode(PROMPT)
    assert decoded(folder, ids) == torch_tokens(low, ids, Recipe.of(kv="8:static"), folder / RANGES_FILE)


def test_states_and_latents_pass_through_onnxruntime_genai(own_decoder, tmp_path):
    folder = exported(own_decoder, tmp_path / "out")
    model = genai.Model(str(folder))
    ids = Generator(folder, 1).text.encode(PROMPT)
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(ids) + NEW, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array(ids, np.int32))
    made = []
    while not generator.is_done() and len(made) < NEW:
        generator.generate_next_token()
        made.append(int(generator.get_next_tokens()[0]))
    wanted = torch_tokens(own_decoder, ids)
    assert len(made) > 1
    assert made == wanted[: len(made)]


FORMS = [{"portable": True}, {"cache": False}, {"dtype": "float16"}, {"logits": "6:row"}, {"logits": "6:tensor"}]


@pytest.mark.parametrize("options", sampled(FORMS, 3), ids=str)
def test_other_forms_of_states_and_windows_are_proved(options, phi, tmp_path):
    assert verify(exported(phi, tmp_path / "out", **options), phi).passed


def test_the_example_feeds_states(phi, tmp_path):
    folder = exported(phi, tmp_path / "out")
    tokenizer = tiny_lm.tokenizer()
    ids = tokenizer(PROMPT)["input_ids"]
    text = by_the_example(folder, PROMPT)
    assert text.startswith(tokenizer.decode([*ids, *torch_tokens(phi, ids)], skip_special_tokens=True))


def test_states_take_no_more_for_a_longer_text(phi, tmp_path):
    model = OnnxModel(exported(phi, tmp_path / "out"), 1)
    cache = model.require_cache()
    ids = random_ids(1, 30, 4).numpy() % tiny_lm.WORDS
    sizes = []
    for length in (5, 30):
        _, kept = model.run(ids[:, :length], np.ones((1, length), np.int64), model.allocate_cache(1))
        sizes.append(sum(value.numpy().nbytes for value in kept))
    assert sizes == [5 * cache.bytes_per_token + cache.state_bytes, 30 * cache.bytes_per_token + cache.state_bytes]


def windowed(layer, window):
    return lambda e: e.set_attribute("local_window_size", window, [e.node(f"layers.{layer}.attention")])


def rewired(output, place, name):
    """A fault by which a node takes another value for one of its inputs."""

    def edit(e):
        e.node(output).input[place] = name

    return edit


def one_of_padding(e):
    e.node("Less").op_type = "LessOrEqual"


FAULTS = {
    "a window of one token more": windowed(1, 7),
    "no window": windowed(3, -1),
    "a window where there is none": windowed(7, 20),
    "slower decay": lambda e: e.change("layers.2.A", lambda x: x * np.float32(0.97)),
    "a convolution that runs backwards": lambda e: e.change("layers.0.conv1d.weight", lambda x: x[::-1].copy()),
    "no skip": lambda e: e.change("layers.4.D", lambda x: x * 0),
    "memory before the skip": rewired("layers.6.Mul_2", 0, "layers.2.scanned"),
    "keys of another layer": rewired("layers.7.attention", 1, "layers.3.key"),
    "values of another layer's past": rewired("layers.7.attention", 5, "past_key_values.3.value"),
    "another layer's state": rewired("layers.2.scanned", 6, "past_ssm.0"),
    "another layer's inputs": rewired("layers.2.convolved", 4, "past_conv.0"),
    "a token of padding in the state": one_of_padding,
}


@pytest.fixture(scope="module")
def sound(phi, tmp_path_factory):
    return exported(phi, tmp_path_factory.mktemp("sound") / "out")


@pytest.mark.parametrize("fault", sampled(FAULTS, 3))
def test_a_fault_of_states_windows_and_shared_keys_is_refused(fault, phi, sound, tmp_path):
    planted = PlantedExport.copy(sound, tmp_path / "planted")
    FAULTS[fault](planted)
    planted.save()
    with pytest.raises(ToleranceError):
        verify(planted.folder, phi)


def test_a_page_that_shows_attention_in_every_layer_is_refused(phi, tmp_path):
    with pytest.raises(CheckpointError, match=r"its mamba and gated memory layers have none"):
        export(phi, tmp_path / "out", ExportOptions.parse(web=True))
    assert not (tmp_path / "out").exists()

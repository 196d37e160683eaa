"""The attention of Dragon and Olala: the formulas in NumPy and float64, decoding step by step, and its cache."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import diffquant
from diffquant.errors import UnknownModelTypeError, UsageError
from diffquant.family.mask import Mask
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters import adapter_for
from diffquant.model.cache import PackedLayer
from diffquant.model.dragon.attention import TensorProductAttention
from diffquant.model.dragon.blocks import TensorProductBlock
from diffquant.model.dragon.cache import MixedLayer
from diffquant.numbers.rotation import rotation
from diffquant.recipe import Recipe
from tests.support.checkpoints import edit_json, write_checkpoint

HIDDEN, GROUPS, SIGNALS, WIDTH, RANK, REACH, CAP = 12, 2, 3, 6, 2, 3, 5.0
SPEC = DiffSpec(
    pairs=GROUPS * SIGNALS,
    kv_pairs=GROUPS,
    head_dim=WIDTH,
    value_dim=WIDTH,
    shared_k=True,
    lam="sigmoid",
    rope="none",
    signals_per_noise=SIGNALS,
    output_gate=True,
    soft_cap=CAP,
)
BLOCK = TensorProductBlock(layer=4, spec=SPEC, width=HIDDEN, rank=RANK, eps=1e-6, reach=REACH)
RELEASED = TensorProductBlock(
    layer=4,
    spec=DiffSpec(
        pairs=36,
        kv_pairs=12,
        head_dim=128,
        value_dim=128,
        shared_k=True,
        lam="sigmoid",
        rope="none",
        signals_per_noise=3,
        output_gate=True,
        soft_cap=150.0,
    ),
    width=1536,
    rank=4,
    eps=1e-6,
    reach=1024,
)


def formulas(tensors: dict[str, np.ndarray], h: np.ndarray) -> np.ndarray:
    """The layer as its authors' code has it, a sequence and a token at a time."""
    of = {name.removesuffix(".weight").removeprefix("mixer."): x for name, x in tensors.items()}
    length = len(h)
    q = (h @ of["c_q"].T).reshape(length, GROUPS * (SIGNALS + 1), WIDTH)
    raw = {}
    for name in "kv":
        a, b = h @ of[f"W_A_{name}"].T, h @ of[f"W_B_{name}"].T
        raw[name] = np.zeros((length, GROUPS, WIDTH))
        for t in range(length):
            for g in range(GROUPS):
                for r in range(RANK):
                    raw[name][t, g] += a[t, g * RANK + r] * b[t, r * WIDTH : (r + 1) * WIDTH] / RANK
    mixed = {name: x.copy() for name, x in raw.items()}
    for name in "kv":
        share = sigmoid(h @ of[f"shift_proj_{name}"].T)
        for t in range(1, length):
            kept = (1 - share[t])[:, None] * raw[name][t]
            mixed[name][t] = share[t][:, None] * raw[name][t - 1] + kept
    k, v = norm(mixed["k"], of["k_norm.norm"]), mixed["v"]
    lam, gate = sigmoid(h @ of["lambda_proj"].T), h @ of["gate_proj"].T + 1.15
    out = np.zeros((length, GROUPS * SIGNALS, WIDTH))
    for t in range(length):
        seen = range(max(0, t - REACH), t + 1)
        for g in range(GROUPS):
            maps = []
            for head in range(4 * g, 4 * g + 4):
                query = of["softmax_scaler"][head] * math.log(min(t + 1, REACH)) * norm(q[t, head], of["q_norm.norm"])
                logits = [CAP * math.tanh(query @ k[s, g] / WIDTH / CAP) for s in seen]
                weights = np.exp(np.array(logits) - max(logits))
                maps.append(weights / weights.sum() @ v[list(seen), g])
            for j in range(SIGNALS):
                out[t, SIGNALS * g + j] = maps[j] - lam[t, g] * maps[SIGNALS]
    y = out.reshape(length, -1) * (gate * sigmoid(gate))
    return y @ of["mixer_proj"].T


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight)


@pytest.fixture(scope="module")
def attention() -> TensorProductAttention:
    module, generator = TensorProductAttention(BLOCK).double(), torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module.requires_grad_(False)


def inputs(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def wanted(attention: TensorProductAttention, h: Tensor) -> Tensor:
    tensors = {name: x.numpy() for name, x in attention.state_dict().items()}
    return torch.from_numpy(np.stack([formulas(tensors, row) for row in h.numpy()]))


def new_layer(recipe: Recipe | None = None) -> MixedLayer:
    return MixedLayer(recipe or Recipe(), {}, REACH + 1)


def in_pieces(attention, h, pieces, valid=None, recipe=None) -> Tensor:
    layer, outputs, done = new_layer(recipe), [], 0
    for part in h.split(pieces, 1):
        seen = None if valid is None else valid[:, : done + part.shape[1]]
        outputs.append(attention(part, Mask(seen), done, layer))
        done += part.shape[1]
    return torch.cat(outputs, 1)


def test_it_computes_the_formulas(attention):
    h = inputs(2, 11)
    torch.testing.assert_close(attention(h, Mask()), wanted(attention, h), rtol=0, atol=1e-11)


def test_the_soft_cap_and_the_window_are_felt(attention):
    """The formulas would not tell a cap that nothing reaches, or a window that hides nothing."""
    h, exact = inputs(2, 11), wanted(attention, inputs(2, 11))
    for changes in ({"spec": replace(SPEC, soft_cap=1e9)}, {"reach": None}):
        other = TensorProductAttention(replace(BLOCK, **changes))
        other.load_state_dict(attention.state_dict())
        assert not torch.allclose(other.double()(h, Mask()), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("pieces", [[1] * 13, [5, 1, 1, 6], [12, 1]], ids=str)
def test_decoding_in_steps_is_reading_at_once(attention, pieces):
    h = inputs(2, 13)
    torch.testing.assert_close(in_pieces(attention, h, pieces), attention(h, Mask()), rtol=0, atol=1e-11)


def test_padding_on_either_side_and_in_between_changes_nothing(attention):
    h = inputs(1, 9)
    exact = wanted(attention, h)[0]
    gaps = [torch.tensor(places) for places in ([*range(4), 7, 8, *range(12, 15)], range(6, 15), range(9))]
    padded, valid = inputs(3, 15) + 7, torch.zeros(3, 15, dtype=torch.bool)
    for row, places in enumerate(gaps):
        padded[row, places], valid[row, places] = h[0], True
    for pieces in ([15], [5, 1, 9], [1] * 15):
        read = in_pieces(attention, padded, pieces, valid)
        for row, places in enumerate(gaps):
            torch.testing.assert_close(read[row, places], exact, rtol=0, atol=1e-11)


def test_its_cache_holds_a_window_and_one_token_as_it_was_projected(attention):
    layer = new_layer()
    for part in inputs(2, 13).split([9, 1, 3], 1):
        attention(part, Mask(), 0, layer)
        assert layer.get_seq_length() == REACH
    rows = 2 * REACH * GROUPS * 2 * WIDTH
    newest = 2 * GROUPS * 2 * WIDTH
    assert layer.nbytes == 8 * (rows + newest) + 2
    layer.reset()
    assert layer.nbytes == 0


@pytest.mark.parametrize("scheme", ["8", "4:row:rotated"])
def test_a_quantized_cache_reads_alike_at_once_and_in_steps(attention, scheme):
    recipe, h = Recipe.of(kv=scheme), inputs(2, 13)
    turned = rotation(WIDTH) if "rotated" in scheme else None
    mixer = attention.mixer
    mixer.key_rotation = mixer.value_rotation = turned
    try:
        at_once = attention(h, Mask(), 0, new_layer(recipe))
        torch.testing.assert_close(in_pieces(attention, h, [5, 1, 7], recipe=recipe), at_once, rtol=0, atol=1e-10)
        assert not torch.allclose(at_once, wanted(attention, h), rtol=0, atol=1e-4)
        exact = attention(h, Mask(), 0, new_layer(Recipe.of(kv=scheme, residual=100)))
        torch.testing.assert_close(exact, wanted(attention, h), rtol=0, atol=1e-10)
    finally:
        mixer.key_rotation = mixer.value_rotation = None


def test_beams_take_their_newest_token_along(attention):
    layer, h = new_layer(), inputs(2, 8)
    attention(h[:, :7], Mask(), 0, layer)
    layer.reorder_cache(torch.tensor([1, 0]))
    turned = attention(h.flip(0)[:, 7:], Mask(), 7, layer)
    torch.testing.assert_close(turned.flip(0), attention(h, Mask())[:, 7:], rtol=0, atol=1e-11)


def test_a_released_models_cache_takes_3072_values_a_token():
    rows, storage = RELEASED.stored, PackedLayer(Recipe(), {})
    storage.update(
        *(torch.zeros(1, heads, 100, width, dtype=torch.bfloat16) for heads, width in (rows.keys, rows.values))
    )
    assert storage.nbytes == 100 * 2 * 3072


def test_its_names_and_shapes_are_those_of_the_converter():
    shapes = {name: list(each.shape) for name, each in RELEASED.parameters().items()}
    assert shapes == {
        "mixer.c_q.weight": [6144, 1536],
        **{f"mixer.W_A_{of}.weight": [48, 1536] for of in "kv"},
        **{f"mixer.W_B_{of}.weight": [512, 1536] for of in "kv"},
        **{f"mixer.{name}.weight": [12, 1536] for name in ("shift_proj_k", "shift_proj_v", "lambda_proj")},
        **{f"mixer.{of}_norm.norm.weight": [128] for of in "qk"},
        "mixer.softmax_scaler": [48],
        "gate_proj.weight": [4608, 1536],
        "mixer_proj.weight": [1536, 4608],
    }
    with torch.device("meta"):
        module = RELEASED.new_module()
    assert shapes == {name: list(parameter.shape) for name, parameter in module.named_parameters()}


def test_bfloat16_computes_the_same_but_for_its_rounding(attention):
    h = inputs(2, 11)
    half = TensorProductAttention(BLOCK)
    half.load_state_dict(attention.state_dict())
    y = half.to(torch.bfloat16)(h.to(torch.bfloat16), Mask())
    assert y.dtype == torch.bfloat16
    assert (y - wanted(attention, h)).norm() < 0.03 * wanted(attention, h).norm()


def test_float16_and_masks_of_each_query_are_refused(attention):
    with pytest.raises(UsageError, match="overflow float16; run them in bfloat16"):
        attention(inputs(1, 3).half(), Mask())
    with pytest.raises(UsageError, match="mixed with the one before"):
        attention(inputs(1, 3), Mask(seen=torch.ones(1, 1, 3, 3, dtype=torch.bool)))


@pytest.mark.parametrize("model_type", ["dragon", "olala"])
def test_the_rest_of_the_model_is_refused_by_name(model_type):
    with pytest.raises(UnknownModelTypeError, match=rf"'{model_type}' is not read.*not Mamba-3.*weights_only=True"):
        adapter_for({"model_type": model_type})


@pytest.mark.parametrize("model_type", ["dragon", "olala"])
@pytest.mark.parametrize(
    ("verb", "given"),
    [
        (diffquant.export, ["out"]),
        (diffquant.search, ["out", 5]),
        (diffquant.calibrate, ["out"]),
        (diffquant.load, []),
        (diffquant.generate, ["the cat"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_verbs_refuse_a_folder_of_it_by_name_before_they_write(tmp_path, model_type, verb, given):
    write_checkpoint(tmp_path / "model", "llama")
    edit_json(tmp_path / "model" / "config.json", model_type=model_type)
    out = [tmp_path / "out" if each == "out" else each for each in given]
    with pytest.raises(UnknownModelTypeError, match=rf"'{model_type}' is not read.*not Mamba-3"):
        verb(tmp_path / "model", *out)
    assert not (tmp_path / "out").exists()

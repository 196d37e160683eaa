"""Phi-4-mini-flash-reasoning: the formulas in NumPy and float64, transformers' Mamba, and decoding step by step."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from diffquant import Recipe, load, quantize
from diffquant.calib.outlier_result import HIDDEN, LOGITS, RANKS
from diffquant.calib.outliers import measure_magnitudes
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, UsageError
from diffquant.measure.language_model import Request
from diffquant.measure.scoring import score
from diffquant.measure.sweep.subject import kv_bytes_per_token
from diffquant.measure.torch_model import TorchModel
from diffquant.model.adapters import adapter_for
from diffquant.model.cache import PackedLayer
from diffquant.model.reading import Reading
from diffquant.model.sambay.architecture import MambaBlock
from diffquant.model.sambay.layers import Mamba
from diffquant.model.windowed_cache import MixedCache
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.roundings import rounding_named
from diffquant.quantization.roundings.gptq import descent
from diffquant.recipe.rounding import RoundingSettings
from diffquant.recipe.scheme import Scheme
from diffquant.support.progress import report_nothing
from tests.support import tiny_lm
from tests.support.checkpoints import PHI4FLASH, write_random
from tests.support.tables import in_one_test

CONFIG = PHI4FLASH["phi4flash"]
WINDOW, LAYERS = CONFIG["sliding_window"], CONFIG["num_hidden_layers"]
# λ and the norm of a pair are computed in float32, whatever the model is in.
TOLERANCE = 2e-6
PHI4_MINI_FLASH: dict[str, Any] = {"model_type": "phi4flash", "vocab_size": 200064, "hidden_size": 2560}
PHI4_MINI_FLASH |= {"intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 40}
PHI4_MINI_FLASH |= {"num_key_value_heads": 20, "sliding_window": 512, "mb_per_layer": 2, "layer_norm_eps": 1e-5}
PHI4_MINI_FLASH |= {"max_position_embeddings": 262144, "tie_word_embeddings": True, "mlp_bias": False}
PHI4_MINI_FLASH |= {"lm_head_bias": False, "hidden_act": "silu"}
PHI4_MINI_FLASH |= {f"{name}_token_id": 199999 for name in ("pad", "bos", "eos")}


class Formulas:
    """The model as its paper and its tensors' names have it, one sequence at a time, in NumPy and float64."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        # Magnitudes of each layer's attention logits, and of its output.
        self.seen: dict[int, list[float]] = {layer: [] for layer in range(1, LAYERS, 2)}
        self.hidden: dict[int, np.ndarray] = {}

    def logits(self, ids: list[int]) -> np.ndarray:
        table = self.tensors["model.embed_tokens.weight"]
        x, memory, shared = table[ids], None, None
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            normed = self.norm(x, at + "input_layernorm")
            if layer % 2:
                mixed, shared = self.attention(normed, layer, shared)
            elif layer <= LAYERS // 2:
                mixed, memory = self.mamba(normed, at + "attn.")
            else:
                gate = silu(normed @ self.tensors[at + "attn.in_proj.weight"].T)
                mixed = (memory * gate) @ self.tensors[at + "attn.out_proj.weight"].T
            x = x + mixed
            inner = self.norm(x, at + "post_attention_layernorm") @ self.tensors[at + "mlp.fc1.weight"].T
            gate, value = np.split(inner, 2, axis=1)
            x = x + (value * silu(gate)) @ self.tensors[at + "mlp.fc2.weight"].T
            self.hidden[layer] = np.abs(x)
        return self.norm(x, "model.final_layernorm") @ table.T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + CONFIG["layer_norm_eps"])
        return scaled * self.tensors[name + ".weight"] + self.tensors[name + ".bias"]

    def mamba(self, x: np.ndarray, at: str) -> tuple[np.ndarray, np.ndarray]:
        of = {name.removeprefix(at): tensor for name, tensor in self.tensors.items() if name.startswith(at)}
        u, z = np.split(x @ of["in_proj.weight"].T, 2, axis=1)
        taps, states = CONFIG["mamba_d_conv"], CONFIG["mamba_d_state"]
        rank = math.ceil(CONFIG["hidden_size"] / 16)
        y, h = np.zeros_like(u), np.zeros((u.shape[1], states))
        for t in range(len(u)):
            c = of["conv1d.bias"].copy()
            for back in range(min(taps, t + 1)):
                c += of["conv1d.weight"][:, 0, taps - 1 - back] * u[t - back]
            c = silu(c)
            low = of["x_proj.weight"] @ c
            step = np.log1p(np.exp(of["dt_proj.weight"] @ low[:rank] + of["dt_proj.bias"]))
            into, out_of = low[rank : rank + states], low[rank + states :]
            decay = np.exp(step[:, None] * -np.exp(of["A_log"]))
            h = decay * h + step[:, None] * into[None] * c[:, None]
            y[t] = h @ out_of + of["D"] * c
        return (y * silu(z)) @ of["out_proj.weight"].T, y

    def attention(self, x: np.ndarray, layer: int, shared: Any) -> tuple[np.ndarray, Any]:
        at, heads, kv_heads = (
            f"model.layers.{layer}.attn.",
            *(CONFIG[f"num_{n}_heads"] for n in ("attention", "key_value")),
        )
        d = CONFIG["hidden_size"] // heads
        projected = x @ self.tensors[at + "Wqkv.weight"].T + self.tensors[at + "Wqkv.bias"]
        q = projected[:, : heads * d].reshape(-1, heads, d)
        if layer <= LAYERS // 2 + 1:
            rest = projected[:, heads * d :].reshape(-1, 2 * kv_heads, d)
            shared = rest[:, :kv_heads], rest[:, kv_heads:]
        k, v = shared
        window = WINDOW if layer < LAYERS // 2 else len(x)
        init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        lq1, lk1, lq2, lk2 = (self.tensors[f"{at}inner_cross_attn.lambda_{n}"] for n in ("q1", "k1", "q2", "k2"))
        lam = math.exp(lq1 @ lk1) - math.exp(lq2 @ lk2) + init
        out = np.zeros((len(x), heads // 2, 2 * d))
        for pair in range(heads // 2):
            of_keys = pair // (heads // kv_heads)
            values = np.concatenate([v[:, 2 * of_keys], v[:, 2 * of_keys + 1]], 1)
            for t in range(len(x)):
                seen = slice(max(0, t - window + 1), t + 1)
                maps = [k[seen, 2 * of_keys + m] @ q[t, 2 * pair + m] / math.sqrt(d) for m in (0, 1)]
                self.seen[layer] += [abs(logit) for one_map in maps for logit in one_map]
                y = (softmax(maps[0]) - lam * softmax(maps[1])) @ values[seen]
                y = y / np.sqrt((y**2).mean() + 1e-5) * self.tensors[at + "inner_cross_attn.subln.weight"]
                out[t, pair] = y * (1 - init)
        flat = out.reshape(len(x), -1)
        return flat @ self.tensors[at + "out_proj.weight"].T + self.tensors[at + "out_proj.bias"], shared


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def random_ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, CONFIG["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi4flash") / "model"
    return folder, write_random(folder, CONFIG, torch.float64)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint[0])


def test_logits_are_those_of_the_formulas(checkpoint, model):
    ids = random_ids(2, 19)
    wanted = np.stack([Formulas(checkpoint[1]).logits(row) for row in ids.tolist()])
    np.testing.assert_allclose(model(ids).logits.numpy(), wanted, rtol=0, atol=TOLERANCE)


def test_mamba_is_that_of_transformers():
    theirs = {"hidden_size": 24, "state_size": 5, "conv_kernel": 3, "time_step_rank": 2, "num_hidden_layers": 1}
    torch.manual_seed(0)
    oracle = MambaMixer(MambaConfig(**theirs, expand=2, use_bias=False, use_conv_bias=True), 0).eval()
    for parameter in oracle.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = Mamba(MambaBlock(width=24, inner=48, states=5, kernel_size=3, rank=2))
    ours.load_state_dict(oracle.state_dict())
    x = torch.randn(2, 70, 24)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, Reading.of(None, 70, None, None), None)[0], oracle(x), rtol=1e-5, atol=1e-5)


def test_beams_carry_their_states_along(model):
    ids = random_ids(1, 9).expand(2, -1)
    settings = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    one, other = model.generate(ids, **settings)
    assert torch.equal(one, other)
    assert torch.equal(model.generate(ids[:1], **settings)[0], one)


def test_its_names_shapes_and_bytes_are_those_of_the_published_index():
    architecture = adapter_for(PHI4_MINI_FLASH).architecture
    shapes = {name: each.shape for name, each in architecture.parameters.items()}
    parameters = {name: math.prod(shape) for name, shape in shapes.items()}
    assert sum(parameters.values()) == 3_852_562_944
    # bfloat16, but for A_log and λ.
    wide = sum(n for name, n in parameters.items() if ".A_log" in name or ".lambda_" in name)
    assert 2 * sum(parameters.values()) + 2 * wide == 7_706_608_640
    with torch.device("meta"):
        model = architecture.new_model()
    assert shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert model.config.diff_spec == architecture.diff_spec
    layers = [
        {n.split(".", 3)[3]: list(s) for n, s in shapes.items() if n.startswith(f"model.layers.{i}.")}
        for i in range(32)
    ]
    assert [len(layer) for layer in layers] == [8 if i % 2 == 0 and i > 16 else 15 for i in range(32)]
    assert layers[17]["attn.Wqkv.weight"] == [5120, 2560]
    assert layers[19]["attn.Wqkv.weight"] == [2560, 2560]
    assert layers[16]["attn.x_proj.weight"] == [192, 5120]
    assert layers[18]["attn.in_proj.weight"] == [5120, 2560]


def test_what_goes_into_exponentials_norms_and_the_convolution_stays_as_it_is(checkpoint, tmp_path):
    folder = tmp_path / "plain"
    write_random(folder, CONFIG, torch.bfloat16)
    quantize(folder, tmp_path / "low", Recipe.of(weights="4:g32"))
    before, after = (load(f, dtype=torch.float32).state_dict() for f in (folder, tmp_path / "low"))
    changed = {name.split(".", 3)[-1] for name, x in before.items() if not torch.equal(x, after[name])}
    mixers = {f"attn.{name}.weight" for name in ("Wqkv", "in_proj", "x_proj", "out_proj")}
    assert changed == mixers | {"mlp.fc1.weight", "mlp.fc2.weight"}
    assert inspect_checkpoint(tmp_path / "low").packed == 8 * 2 + 3 * 3 + 1 * 2 + 4 * 2


def test_a_half_type_leaves_the_recurrences_parameters_in_float32(checkpoint):
    state = load(checkpoint[0], dtype=torch.bfloat16).state_dict()
    wide = {name.rpartition(".")[2] for name, x in state.items() if x.dtype == torch.float32}
    assert wide == {"A_log", "D", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}


def test_a_cache_costs_a_window_of_tokens_in_windowed_layers_and_all_in_one(checkpoint):
    model = load(checkpoint[0], Recipe.of(kv="8"))
    spec = model.config.diff_spec
    # Codes of 8 bits, and a scale of 16 a head.
    token = spec.key_heads * (spec.head_dim + 2) + spec.kv_pairs * (spec.value_dim + 2)
    assert kv_bytes_per_token(model) == pytest.approx(token * (1024 + 2 * (WINDOW - 1)) / 1024)


def test_a_prompt_in_the_cache_takes_the_memory_of_its_keys_and_values_alone(model):
    """And none of the queries, which the same product computes."""
    cache = model.new_cache()
    model(random_ids(2, 20), past_key_values=cache)
    layers = [layer for layer in cache.layers if isinstance(layer, PackedLayer)]
    kept = [layer.stored_keys.read().nbytes + layer.stored_values.read().nbytes for layer in layers]
    assert [layer.nbytes for layer in layers] == kept


def test_continuations_score_alike_from_a_shared_cache_and_from_the_start(model):
    """Contexts are padded on the left and continuations on the right, as tasks score them."""
    ids = random_ids(1, 60)[0].tolist()
    contexts = [tuple(ids[:n]) for n in (3, 11, 20)]
    requests = [Request(c, tuple(ids[20 + n : 21 + 2 * n])) for c in contexts for n in (0, 2, 9)]
    for request, scored in zip(requests, score(TorchModel(model), requests, batch_tokens=64), strict=True):
        text = torch.tensor([request.context + request.continuation])
        logprobs = model(text[:, :-1]).logits[0, len(request.context) - 1 :].double().log_softmax(-1)
        wanted = logprobs.gather(1, torch.tensor(request.continuation)[:, None]).sum()
        assert scored[0] == pytest.approx(float(wanted), abs=1e-4)


def test_every_layer_with_attention_quantizes_its_logits_and_no_other_is_asked_to(checkpoint):
    model = load(checkpoint[0], Recipe.of(logits="6:row"))
    ids = random_ids(2, 13)
    first = model(ids).logits
    model.check_quantizers_ran()
    entries = {report["layer"]: report["entries"] for report in model.logit_report()}
    over_all, over_window = 13 * 14 // 2, sum(min(n, WINDOW) for n in range(1, 14))
    heads = 2 * CONFIG["num_attention_heads"]
    assert entries == {1: heads * over_window, 3: heads * over_window, 5: heads * over_all, 7: heads * over_all}
    model.use_attention("naive")
    torch.testing.assert_close(model(ids).logits, first, rtol=0, atol=TOLERANCE)
    with pytest.raises(UsageError, match="match no layer"):
        model.apply_recipe(Recipe.of(overrides={"model.layers.2.self_attn.logits": "4"}))
    with pytest.raises(UsageError, match="match no layer"):
        model.apply_recipe(Recipe.of(overrides={"model.layers.7.self_attn.k": "4"}))


def test_every_backend_that_takes_windows_computes_them_alike(model):
    ids = random_ids(2, 15)
    wanted = model(ids).logits
    for backend in ("naive", "flashdiff1", "flashdiff2"):
        model.use_attention(backend)
        torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=TOLERANCE)
    model.use_attention("auto")


def test_outliers_are_those_of_the_formulas(checkpoint, model):
    ids = random_ids(1, 19)
    formulas = Formulas(checkpoint[1])
    formulas.logits(ids[0].tolist())
    layers, overall = measure_magnitudes(model, ids)
    assert [LOGITS in layer for layer in layers] == [False, True] * 4
    for number, layer in enumerate(layers):
        assert layer[HIDDEN].top[3] == pytest.approx(np.sort(formulas.hidden[number].ravel())[-3], rel=1e-5)
        if LOGITS in layer:
            logits = np.sort(formulas.seen[number])
            assert layer[LOGITS].count == len(logits)
            assert [layer[LOGITS].top[rank] for rank in RANKS] == pytest.approx(
                [logits[-rank] for rank in RANKS], rel=1e-5
            )
    assert overall[LOGITS].count == sum(map(len, formulas.seen.values()))


@pytest.mark.parametrize("name", ["gptq", "tuned"])
def test_rules_that_read_a_text_round_every_weight_of_the_layers(tmp_path, monkeypatch, name):
    monkeypatch.setattr(descent, "_STEPS", 4)
    folder = tmp_path / "plain"
    write_random(folder, CONFIG | {"vocab_size": tiny_lm.WORDS}, torch.float32)
    tiny_lm.tokenizer().save_pretrained(folder)
    source = open_source(folder)
    shapes = source.architecture.linear_shapes()
    schemes = {name.removesuffix(".weight"): Scheme.parse("4:row") for name in shapes}
    settings = RoundingSettings(name, tokens=64, window=32)
    rounded = rounding_named(name).prepare(source, schemes, settings, report_nothing).finish()
    assert {name: tuple(codes.shape) for name, (codes, _) in rounded.made.items()} == dict(shapes)


def test_a_cache_that_cannot_hold_the_states_is_refused(model):
    from transformers import DynamicCache

    with pytest.raises(UsageError, match="DynamicCache does not hold Mamba's states"):
        model(random_ids(1, 3), past_key_values=DynamicCache())
    # That other cache is not what its message advises.
    with pytest.raises(UsageError, match=r"DynamicSlidingWindowLayer, which .* stored; pass the result of new_cache"):
        model(random_ids(1, 3), past_key_values=DynamicCache(config=model.config))
    with pytest.raises(UsageError, match="layer 0 of the cache holds no recurrent state"):
        MixedCache(Recipe(), [PackedLayer(Recipe(), {})]).recurrent_layer(0)
    cache = model.new_cache()
    model(random_ids(1, 3), past_key_values=cache)
    with pytest.raises(UsageError, match="cannot re"):
        cache.crop(-1)


@in_one_test(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 30}, "num_hidden_layers is 30, not a multiple of 4"),
        ({"mb_per_layer": 4}, "mb_per_layer is 4, not 2"),
        ({"sliding_window": [512]}, r"sliding_window is \[512\], not an integer above 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"mamba_dt_rank": 128}, "mamba_dt_rank is 128, not 160"),
        ({"mamba_d_state": "16"}, "mamba_d_state is '16'"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True, not False"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias is False, not True"),
        ({"lm_head_bias": True}, "lm_head_bias is True"),
        ({"layer_types": ["full_attention"]}, "layer_types is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling is"),
        ({"num_attention_heads": 39, "hidden_size": 2496}, "num_attention_heads is 39"),
        ({"num_key_value_heads": 15}, "num_key_value_heads is 15"),
        ({"hidden_size": 2570}, "hidden_size 2570 is not a multiple"),
        ({"head_dim": 128}, "head_dim is 128"),
        ({"hidden_act": "poly_norm"}, "hidden_act is 'poly_norm', which has parameters"),
        ({"layer_norm_eps": "1e-5"}, "layer_norm_eps is '1e-5'"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_naming_its_key(changes, message):
    with pytest.raises(CheckpointError, match=message):
        adapter_for(PHI4_MINI_FLASH | changes)


def test_its_file_says_what_it_is(checkpoint):
    inspection = inspect_checkpoint(checkpoint[0])
    assert json.loads(json.dumps(inspection.to_dict()))["kinds"]["mamba"] == 3
    assert "3 mamba, 2 windowed attention, 1 full attention, 1 gated memory, 1 cross attention" in str(inspection)
    tensors = {name: tensor.double() for name, tensor in checkpoint[1].items()}
    for layer, lam in zip((1, 3, 5, 7), inspection.lam, strict=True):
        q1, k1, q2, k2 = (
            tensors[f"model.layers.{layer}.attn.inner_cross_attn.lambda_{n}"] for n in ("q1", "k1", "q2", "k2")
        )
        assert lam == pytest.approx(
            math.exp(q1 @ k1) - math.exp(q2 @ k2) + 0.8 - 0.6 * math.exp(-0.3 * layer), rel=1e-5
        )

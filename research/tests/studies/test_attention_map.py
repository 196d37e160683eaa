"""Where attention goes, against transformers' eager maps, the attention's own output and masses known by hand."""

import json
import re
import shutil

import pytest
import torch
import typer
from typer.testing import CliRunner

from diffquant import data
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import NonFiniteError, UsageError
from diffquant.measure.language_model import RequestEncoder
from diffquant.measure.protocols import needle
from diffquant.measure.protocols.needle import DEPTHS, NeedlePlan, make_items
from diffquant.model.config import DiffTransformerConfig
from diffquant.model.fused_cache import FusedCache
from diffquant.model.modeling import DiffTransformer
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from research.studies import attention_by_part as measuring
from research.studies import attention_map
from research.studies.attention_by_part import attention_by_part, last_weights, map_attention
from research.studies.needle_parts import PARTS, Prompt, make_prompt
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.models import ours, random_diffllama, random_ids, random_llama

LENGTH = 37
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def random_prompt(length=LENGTH):
    parts = torch.randint(0, len(PARTS), (length,), generator=torch.Generator().manual_seed(1)).tolist()
    return Prompt(random_ids(1, length)[0].tolist(), parts, answer=0)


def by_part(row, parts):
    """Sums of [..., S] over the positions of each part."""
    return torch.stack([row[..., torch.tensor(parts) == part].sum(-1) for part in range(len(PARTS))], -1)


def eager_row(oracle, ids):
    """Each layer's softmax at the last query, [layers, heads, S], as transformers returns it."""
    oracle.set_attn_implementation("eager")
    return torch.stack([layer[0, :, -1] for layer in oracle(ids, output_attentions=True).attentions])


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_a_transformers_attention_is_its_eager_map(kv_heads):
    oracle, prompt = random_llama(num_key_value_heads=kv_heads), random_prompt()
    expected = by_part(eager_row(oracle, torch.tensor([prompt.ids])).mean(1), prompt.parts)
    found, _ = attention_by_part(ours(oracle), prompt)
    assert found.shape == (3, 3, len(PARTS))
    for kind in range(3):
        torch.testing.assert_close(found[:, kind].float(), expected, rtol=0, atol=1e-5)


def test_diffllamas_attention_is_the_difference_of_its_eager_maps():
    oracle, prompt = random_diffllama(num_key_value_heads=4), random_prompt()
    first, second = eager_row(oracle, torch.tensor([prompt.ids])).chunk(2, 1)
    lams = []
    for layer in oracle.model.layers:
        q1, k1, q2, k2 = (getattr(layer.self_attn, name) for name in LAMBDAS)
        lams.append((q1 @ k1).exp() - (q2 @ k2).exp() + layer.self_attn.lambda_init)
    signed = first - torch.stack(lams)[:, None, None] * second
    share = signed.abs() / signed.abs().sum(-1, keepdim=True)
    found, _ = attention_by_part(ours(oracle), prompt)
    for kind, rows in enumerate((share, signed, first, second)):
        torch.testing.assert_close(found[:, kind].float(), by_part(rows.mean(1), prompt.parts), rtol=0, atol=1e-5)


RECIPES = [{}, {"kv": "4:row"}, {"k": "4:c8", "v": "4:row"}, {"kv": "4:row", "residual": 9}]
RECIPES += [{"logits": "3:tensor:shift"}, {"logits": "4:b16", "kv": "6:row"}, {"logits": "3:row", "qk": "4:row"}]
RECIPES += [{"qk": "3:b8:smooth"}, {"kv": "3:row:rotated"}, {"kv": "4:row:rotated", "logits": "3:head"}]
# A Transformer has no other map that these could look at.
OF_PAIRS = [{"logits": text} for text in ("3:map", "3:pair", "4:tensor:alike", "3:row:alike")]
MODELS = ["llama", "diffllama", "motif", "unilm-v2", "gated", "motif-grouped"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("members")
    return {source: write_checkpoint(folder / source, source, torch.float64) for source in MODELS}


@pytest.mark.parametrize(
    ("source", "recipe"),
    [(source, recipe) for source in MODELS for recipe in RECIPES + (OF_PAIRS if source != "llama" else [])],
    ids=str,
)
def test_the_weights_give_the_models_own_output(folders, source, recipe):
    model, ids = load(folders[source], Recipe.of(**recipe), torch.float64), random_ids(1, LENGTH)
    walk, layer = model.new_layer_runner(LENGTH), model.model.layers[1]
    attention, spec = layer.self_attn, model.config.diff_spec
    x = walk.run_layer(walk.layers[0], walk.embed(ids))
    computed = []
    attention.o_proj.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0][0, -1]))
    cache = model.new_cache()
    wanted = layer(x, *walk.layer_arguments(layer, cache))
    out, weights, maps = last_weights(walk, layer, x)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(maps.sum(-1), torch.ones(spec.maps, spec.pairs, dtype=torch.float64))
    stored = cache.layers[1]
    values = stored.stored_values.read() if hasattr(stored, "stored_values") else stored.values
    found = weights[:, None] @ values[0].repeat_interleave(spec.pairs // spec.kv_pairs, 0)
    if attention.value_rotation is not None:
        found = found @ attention.value_rotation.double().T
    if spec.post_norm != "none":
        found = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + spec.post_norm_eps) * spec.norm_factor(1)
        found = found * attention.subln.weight if spec.post_norm == "affine" else found
    if spec.output_gate:
        found = found * attention.output_gate_proj(layer.input_layernorm(x)[0, -1]).sigmoid().view(spec.pairs, 1, -1)
    # λ, gates and norms are computed in float32.
    torch.testing.assert_close(found.flatten(), computed[0], rtol=1e-5, atol=1e-6)


def test_a_call_that_is_looked_at_is_not_the_decode_kernels(folders, monkeypatch):
    monkeypatch.setattr(FusedCache, "attend", lambda *_, **__: pytest.fail("its result has no call"))
    monkeypatch.setattr(FusedCache, "update", lambda _, k, v, __: (k, v))
    model = load(folders["unilm-v2"], dtype=torch.float32)
    monkeypatch.setattr(type(model.model), "has_quantized_cache", True)
    monkeypatch.setattr(model.model, "new_cache", lambda: FusedCache(Recipe(), 2))
    walk = model.new_layer_runner(2)
    _, weights, _ = last_weights(walk, walk.layers[0], walk.embed(random_ids(1, 2)))
    assert weights.shape == (2, 2)


def hand_made(lam):
    """One pair whose map 1 sees only token 1 and whose map 2 sees every token alike."""
    spec = {"pairs": 1, "kv_pairs": 1, "head_dim": 2, "value_dim": 2, "shared_k": True, "lam": "sigmoid"}
    sizes = {"vocab_size": 2, "hidden_size": 2, "intermediate_size": 4, "num_hidden_layers": 1, "head_dim": 2}
    config = DiffTransformerConfig(**sizes, num_attention_heads=2, rms_norm_eps=1e-12, spec=spec | {"rope": "none"})
    model = DiffTransformer(config).eval()
    attention = model.attention_modules[0]
    model.model.embed_tokens.weight.copy_(torch.eye(2))
    # The norm makes √2 of each 1; token 1's key has a component that the query of map 1 looks for.
    attention.q_proj.weight.copy_(torch.tensor([[40.0, 40.0], [0, 0], [0, 0], [0, 0]]))
    attention.k_proj.weight.copy_(torch.tensor([[0.0, 1.0], [0, 0]]))
    attention.lambda_proj.weight.fill_(torch.logit(torch.tensor(lam)) / 2**0.5)
    return model


def test_masses_of_a_model_made_by_hand_are_those_it_was_made_for():
    answer, prose, question, first = (PARTS.index(part) for part in ("answer", "prose", "question", "first"))
    prompt = Prompt([0, 0, 0, 1, 0, 0, 0, 0], [first, *[prose] * 2, answer, *[prose] * 2, *[question] * 2], answer=1)
    weights, _ = attention_by_part(hand_made(lam=0.4), prompt)
    share, signed, signal, noise = weights[0]
    counts = {answer: 1, prose: 4, question: 2, first: 1}
    for part, count in counts.items():
        assert float(signal[part]) == pytest.approx(float(part == answer), abs=1e-6)
        assert float(noise[part]) == pytest.approx(count / 8)
        assert float(signed[part]) == pytest.approx((part == answer) - 0.4 * count / 8, abs=1e-6)
        # 0.95 at the answer, -0.05 at each of 7 others.
        assert float(share[part]) == pytest.approx((0.95 if part == answer else 0.05 * count) / 1.3, abs=1e-6)


def test_a_model_that_computes_nan_is_named():
    model = ours(random_llama())
    model.model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        attention_by_part(model, random_prompt())


@pytest.mark.parametrize("adds_bos", [False, True], ids=["plain", "bos"])
def test_every_token_of_a_prompt_belongs_to_its_part(adds_bos):
    tokenizer = tiny_lm.tokenizer(adds_bos)
    encoder = RequestEncoder(tokenizer, 512, len(tokenizer))
    for item in make_items(tokenizer, data.books_text()[:20000], NeedlePlan(3, lengths=(220,), samples=2)):
        prompt = make_prompt(tokenizer, item, len(tokenizer))
        request = encoder.encode_request(*item.query_texts()[0])
        whole = request.context + request.continuation
        assert (*prompt.ids, prompt.answer) == whole[: len(prompt.ids) + 1]
        text = {
            name: tokenizer.decode([i for i, p in zip(prompt.ids, prompt.parts, strict=True) if p == part])
            for part, name in enumerate(PARTS)
        }
        ((city, number),) = item.asked
        assert text["answer"].strip() == number
        assert tokenizer.decode(whole[len(prompt.ids) :]).strip() == number
        assert tokenizer.decode([prompt.answer]).strip() != ""
        # The tokenizer makes the space before a number a token.
        sentence = f"The magic number for {city} is ."
        # The first token is apart; at depth 0 it may be the sentence's.
        assert sentence.endswith(text["sentence"].strip())
        assert len(text["sentence"]) >= len(sentence) - len("The")
        assert text["question"] == f" The magic number for {city} is "
        assert len(re.findall(r"magic number for \w+ is \d\d\.", text["others"])) == 2
        assert "magic" not in text["prose"]
        assert prompt.parts.count(PARTS.index("first")) == 1


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "prose.txt"
    file.write_text(data.books_text()[:20000])
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_lm.write_llama(folder / "llama"), tiny_lm.write_diff_v2(folder / "diff-v2")


def test_a_conversion_shares_its_attention_as_its_source_and_halves_it(models, text):
    plan = NeedlePlan(2, lengths=(120, 160), samples=2)
    found = map_attention(models, plan, text=text, dtype="float32")
    plain, diff = found.models
    assert plain.items == diff.items
    places = [(length, depth) for length in plan.lengths for depth in DEPTHS]
    assert [(p.length, p.depth) for p in plain.places] == [(p.length, p.depth) for p in diff.places] == places
    for one, other in zip(plain.places, diff.places, strict=True):
        assert (one.items, one.right) == (other.items, other.right) == (2, one.right)
        assert list(other.overall) == [*one.overall, "noise"]
        for source, made in zip([one.overall, *one.layers], [other.overall, *other.layers], strict=True):
            assert sum(source["share"].values()) == pytest.approx(1, abs=1e-5)
            assert source["share"] == pytest.approx(source["signed"], abs=1e-5)
            assert made["share"] == pytest.approx(source["share"], abs=1e-5)
            assert made["signed"] == pytest.approx({k: v / 2 for k, v in source["signal"].items()}, abs=1e-5)


def test_right_is_the_share_of_a_places_items_and_progress_counts_them_all(models, text, monkeypatch):
    # Of the five depths the first sample's, then the second's.
    answers, told = iter([True, True, False, False, False, True, False, False, False, True]), []
    measured = measuring.attention_by_part
    monkeypatch.setattr(measuring, "attention_by_part", lambda *given: (measured(*given)[0], next(answers)))
    plan = NeedlePlan(2, lengths=(120,), samples=2)
    (model,) = map_attention(
        models[:1], plan, text=text, dtype="float32", progress=lambda *done: told.append(done)
    ).models
    assert [place.right for place in model.places] == [1, 0.5, 0, 0, 0.5]
    assert told == [(done, 10, "llama") for done in range(1, 11)]


def test_right_is_what_greedy_decoding_says_first(models, text):
    model, tokenizer = load(models[0], dtype=torch.float32), load_tokenizer(models[0])
    item = make_items(tokenizer, text.read_text(), NeedlePlan(lengths=(120,), samples=1))[0]
    prompt = make_prompt(tokenizer, item, len(tokenizer))
    likeliest = int(model(torch.tensor([prompt.ids])).logits[0, -1].argmax())
    for answer in (likeliest, likeliest + 1):
        assert attention_by_part(model, Prompt(prompt.ids, prompt.parts, answer))[1] == (answer == likeliest)


def test_what_cannot_be_measured_is_said(models):
    with pytest.raises(UsageError, match="one answer at a time; 2 needles"):
        map_attention(models, NeedlePlan(2, 2))
    with pytest.raises(UsageError, match="a model's own"):
        map_attention(models, NeedlePlan(), recipe=Recipe.of(kv="8:static"))
    with pytest.raises(UsageError, match="does not say where its tokens stand"):
        make_prompt(type("Slow", (), {"is_fast": False})(), needle.NeedleItem("", (("Paris", "42"),), 0.0, 9), 1)


def run(*arguments):
    program = typer.Typer()
    program.command()(attention_map.main)
    return CliRunner().invoke(program, [str(argument) for argument in arguments])


def test_attention_of_the_models_that_ship_by_depth(tmp_path):
    pocket = data.pocket_models("needle")
    arguments = (*pocket, "--needles", 2, "--samples", 1, "--lengths", "96,128")
    ran = run(*arguments, "--output", tmp_path / "o")
    assert ran.exit_code == 0, ran.exception
    assert (tmp_path / "o" / "attention-map.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "o" / "attention-map.json").read_text())["models"]
    assert sorted(model["generation"] for model in found) == ["DIFF V1", "DIFF V2", "Transformer"]
    for model in found:
        assert [(p["length"], p["depth"]) for p in model["places"]] == [
            (length, depth) for length in (96, 128) for depth in (0, 0.25, 0.5, 0.75, 1)
        ]
        for place in model["places"]:
            for weights in (place["overall"], *place["layers"]):
                for kind in weights.keys() - {"signed"}:
                    assert sum(weights[kind].values()) == pytest.approx(1, abs=1e-5)
    ran = run(*arguments, "--logits", "4:row:shift")
    assert ran.exit_code == 0, ran.exception
    assert ran.stdout.splitlines()[0].split()[:4] == ["model", "tokens", "depth", "answer"]
    assert len(ran.stdout.splitlines()) == 2 + 3 * 2 * 5 + 2


def test_a_length_that_is_named_twice_has_its_items_once_and_models_called_alike_are_told_apart(models, tmp_path):
    folders = [shutil.copytree(model, tmp_path / letter / "hf") for model, letter in zip(models, "ab", strict=True)]
    ran = run(*folders, "--samples", 1, "--lengths", "120,120", "--output", tmp_path / "o")
    assert ran.exit_code == 0, ran.exception
    found = json.loads((tmp_path / "o" / "attention-map.json").read_text())["models"]
    assert [model["name"] for model in found] == ["a/hf", "b/hf"]
    assert [place["items"] for place in found[0]["places"]] == [1] * 5


def test_a_model_without_a_tokenizer_is_told_before_another_is_measured(models, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "load", lambda *_, **__: pytest.fail("it was loaded"))
    bare = shutil.copytree(models[1], tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    ran = run(models[0], bare, "--samples", 1, "--lengths", 120)
    assert "bare: tokenizer.json is missing" in str(ran.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "600"), "prompts of 600 tokens exceed the model's context of 512"),
        (("--needles", "6", "--lengths", "40"), "6 needles do not fit into 40 tokens"),
        (("--needles", "0"), "0 needles"),
        (("--text", "SHORT"), "can encode only 1 of the text's 1 sentences"),
        (("MODEL",), "given twice"),
        (("--logits", "1:row"), "bits must be 2 to 8"),
        (("--logits", "8:static"), "use another granularity"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(models, tmp_path, arguments, message):
    (tmp_path / "SHORT").write_text("One short line of words.")
    places = {"MODEL": models[1], "SHORT": tmp_path / "SHORT"}
    ran = run(models[1], *(places.get(word, word) for word in arguments), "--output", tmp_path / "o")
    assert isinstance(ran.exception, UsageError)
    assert message in str(ran.exception)
    assert not (tmp_path / "o").exists()

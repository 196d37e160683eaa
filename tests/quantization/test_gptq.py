"""GPTQ over a model: the inputs that a layer's weights are rounded for, the outputs that they keep, and their order."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import load_file
from torch import nn

from diffquant import Recipe, load, quantize
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.tokens import encode_windows
from diffquant.data import books_text
from diffquant.errors import UsageError
from diffquant.quantization.roundings.gptq import descent, layer_inputs, sequence
from diffquant.quantization.roundings.gptq.compensation import (
    InputStatistics,
    compute_retargeting,
    damp,
    round_in_order,
)
from diffquant.quantization.roundings.gptq.layer_inputs import group_by_input
from diffquant.quantization.roundings.nearest import search_scale
from diffquant.recipe.numbers.formats import format_named
from tests.support.checkpoints import contents, write_checkpoint
from tests.support.models import random_ids
from tests.support.tables import in_one_test

TOKENS, WINDOW = 256, 64


def settings(**options):
    return {"name": "gptq", "tokens": TOKENS, "window": WINDOW, **options}


@contextmanager
def seen_inputs(model) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs [N, in] of every linear module of the layers, by name, of what the model reads in the body."""
    seen = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].flatten(0, -2)}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def inputs_of(model, source):
    ids = encode_windows(model, open_source(source).tokenizer, books_text(), WINDOW, TOKENS)
    with seen_inputs(model) as seen:
        model(ids)
    return seen


@pytest.fixture
def summed(monkeypatch):
    """Moments by the name of each weight that they are rounded with."""
    moments, plain = {}, sequence.LayerWeights.round

    def watched(self, modules, of_group):
        moments.update({self._name(module).removesuffix(".weight"): of_group for module in modules})
        plain(self, modules, of_group)

    monkeypatch.setattr(sequence.LayerWeights, "round", watched)
    return moments


@pytest.mark.parametrize("target", ["model", "layer"])
def test_a_layer_is_rounded_for_the_inputs_that_it_will_have(checkpoint, tmp_path, summed, target):
    recipe = Recipe.of(weights="3:g16", rounding=settings(target=target))
    quantize(checkpoint, tmp_path / "low", recipe)
    rounded = inputs_of(load(tmp_path / "low", dtype=torch.float32), checkpoint)
    exact = inputs_of(load(checkpoint, dtype=torch.float32), checkpoint)
    assert summed.keys() >= rounded.keys()
    for name, x in rounded.items():
        torch.testing.assert_close(summed[name].products, x.mT @ x, rtol=1e-3, atol=1e-3 * float(x.square().sum()))
        if target == "layer":
            assert summed[name].lost is None
        else:
            y = exact[name]
            torch.testing.assert_close(
                summed[name].lost, (y - x).mT @ x, rtol=1e-3, atol=1e-3 * float(x.norm() * y.norm())
            )
    last = "model.layers.1.mlp.down_proj"
    assert (rounded[last] - exact[last]).norm() > 0.05 * exact[last].norm()


def test_unrounded_inputs_are_the_16_bit_models(checkpoint, tmp_path, summed):
    quantize(checkpoint, tmp_path / "low", Recipe.of(weights="3:g16", rounding=settings(inputs="unrounded")))
    for name, x in inputs_of(load(checkpoint, dtype=torch.float32), checkpoint).items():
        torch.testing.assert_close(summed[name].products, x.mT @ x, rtol=1e-4, atol=1e-5 * float(x.square().sum()))


def interrupt(done, _total, what):
    if what == "rounding by layers" and done == 1:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "rounding",
    [settings(), settings(target="layer"), settings(inputs="unrounded"), settings() | {"name": "tuned"}],
    ids=["gptq", "layer", "unrounded", "tuned"],
)
def test_an_interrupted_run_rounds_no_finished_layer_again(checkpoint, tmp_path, summed, rounding):
    recipe, out = Recipe.of(weights="3:g16", rounding=rounding), tmp_path / "out"
    quantize(checkpoint, tmp_path / "whole", recipe)
    assert {name.split(".")[2] for name in summed} == {"0", "1"}
    with pytest.raises(KeyboardInterrupt, match="1 finished files are kept"):
        quantize(checkpoint, out, recipe, progress=interrupt)
    summed.clear()
    assert quantize(checkpoint, out, recipe).resumed == 1
    assert {name.split(".")[2] for name in summed} == {"1"}
    assert contents(out) == contents(tmp_path / "whole")


def test_a_failed_run_keeps_its_finished_layers_and_says_so(checkpoint, tmp_path, summed):
    recipe, out = Recipe.of(weights="3:g16", rounding=settings()), tmp_path / "out"

    def fail(done, _total, what):
        if what == "rounding by layers" and done == 1:
            raise UsageError("no room")

    with pytest.raises(UsageError, match=r"^no room; finished layers are kept in .*out.partial: the same command"):
        quantize(checkpoint, out, recipe, progress=fail)
    summed.clear()
    assert quantize(checkpoint, out, recipe).resumed == 1
    assert {name.split(".")[2] for name in summed} == {"1"}


KILLED = """
import os, signal, sys
from diffquant import Recipe, quantize

def kill(done, total, what):
    if what == "rounding by layers" and done == total:
        os.kill(os.getpid(), signal.SIGKILL)

rounding = {"name": "tuned", "tokens": 256, "window": 64}
quantize(sys.argv[1], sys.argv[2], Recipe.of(weights="3:g16", rounding=rounding), progress=kill)
"""


def test_a_run_killed_before_its_first_shard_rounds_nothing_again(checkpoint, tmp_path, summed):
    assert subprocess.run([sys.executable, "-c", KILLED, checkpoint, tmp_path / "out"], check=False).returncode == -9
    recipe = Recipe.of(weights="3:g16", rounding=settings() | {"name": "tuned"})
    assert quantize(checkpoint, tmp_path / "out", recipe).resumed == 2
    assert not summed
    quantize(checkpoint, tmp_path / "whole", recipe)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_models_target_brings_its_outputs_nearer(checkpoint):
    ids = encode_windows(load(checkpoint), open_source(checkpoint).tokenizer, books_text(), WINDOW, TOKENS)
    exact = load(checkpoint, dtype=torch.float32)(ids).logits
    lost = {
        target: float((load(checkpoint, recipe, torch.float32)(ids).logits - exact).norm())
        for target in ("model", "layer")
        if (recipe := Recipe.of(weights="3:g16", rounding=settings(target=target)))
    }
    assert lost["model"] < lost["layer"]


@pytest.mark.parametrize(
    ("rule", "options", "budget"),
    [
        ("gptq", {}, 0),
        # Of four batches one has room for the inputs of its modules.
        ("gptq", {}, 900_000),
        ("gptq", {"target": "layer"}, 0),
        ("gptq", {"inputs": "unrounded"}, 0),
        ("tuned", {}, 0),
    ],
    ids=["gptq", "some room", "layer", "unrounded", "tuned"],
)
def test_activations_beyond_the_memorys_budget_go_to_files_and_change_nothing(
    checkpoint, tmp_path, monkeypatch, rule, options, budget
):
    monkeypatch.setattr(descent, "_STEPS", 3)
    saved, save, copied, deepcopy = [], torch.save, [], sequence.copy.deepcopy
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(layer_inputs.torch, "save", lambda state, file: (saved.append(file), save(state, file)))
    copying = SimpleNamespace(deepcopy=lambda layer: copied.append(layer) or deepcopy(layer))
    monkeypatch.setattr(sequence, "copy", copying)
    recipe = Recipe.of(weights="3:g16", rounding={"name": rule, "tokens": 2048, "window": WINDOW, **options})
    quantize(checkpoint, tmp_path / "roomy", recipe)
    assert not saved + copied
    monkeypatch.setattr(layer_inputs, "available_memory", lambda: 2 * budget)
    quantize(checkpoint, tmp_path / "tight", recipe)
    assert (bool(saved), bool(copied)) == (not budget, "inputs" not in options and options.get("target") != "layer")
    assert {file.name for file in tmp_path.iterdir()} == {"roomy", "tight"}
    roomy, tight = (load_file(tmp_path / name / "model.safetensors") for name in ("roomy", "tight"))
    assert all(torch.equal(tensor, tight[name]) for name, tensor in roomy.items())


def test_what_nothing_refers_to_gives_its_room_back_and_its_file_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    store = layer_inputs.ActivationStore(budget=1000)
    first, second = store.keep(torch.ones(200)), store.keep(torch.full((100,), 2.0))
    assert store.free == 200
    (file,) = tmp_path.glob("diffquant-*/*")
    assert (second.get() == 2).all()
    assert store.keep_in_memory(torch.ones(26)) is None
    assert store.keep_in_memory(torch.ones(25)) is not None
    del first, second
    assert (store.free, file.exists()) == (1000, False)


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match=r"activations do not fit into .*absent.*set TMPDIR"):
        layer_inputs.ActivationStore(budget=0).keep(torch.ones(3))


def test_retargeted_weights_are_the_ridge_solution_of_another_solver():
    generator = np.random.default_rng(0)
    y = generator.normal(size=(300, 24))
    x = y + 0.2 * generator.normal(size=(300, 24))
    weight = generator.normal(size=(5, 24))
    products = torch.from_numpy(x.T @ x)
    ridge = damp(products) - products
    moved = torch.from_numpy(weight) @ compute_retargeting(damp(products), torch.from_numpy((y - x).T @ x)).double()
    # Rows that draw the solution to the weight, as the ridge does.
    roots = np.diag(np.sqrt(ridge.diagonal().numpy()))
    theirs, *_ = scipy.linalg.lstsq(np.vstack([x, roots]), np.vstack([y @ weight.T, roots @ weight.T]))
    torch.testing.assert_close(moved + torch.from_numpy(weight), torch.from_numpy(theirs.T), rtol=0, atol=1e-5)
    assert np.linalg.norm(theirs.T - weight) > 0.05 * np.linalg.norm(weight)


def test_columns_in_order_of_inputs_are_gptqs_recurrence_over_them_in_float64():
    torch.manual_seed(0)
    weight = torch.randn(9, 32)
    x = torch.randn(200, 32) * torch.linspace(0.2, 3, 32)[torch.randperm(32)]
    products = damp(x.T @ x)
    inputs = InputStatistics.factorize(products, by_activation=True)
    made = round_in_order(weight.mT.contiguous(), inputs, inputs.order, format_named("4"), 8, torch.float32)
    codes, scales = (each.mT for each in made)
    assert (products.diagonal()[inputs.order].diff() <= 0).all()
    assert not torch.equal(inputs.order, torch.arange(32))
    for group in range(4):
        columns = slice(8 * group, 8 * group + 8)
        fitted = search_scale(weight[:, columns], format_named("4"), torch.float32, products.diagonal()[columns])
        assert torch.equal(scales[:, group, None], fitted)
    left, inverse, expected = weight.double().clone(), products.double().inverse(), torch.empty_like(weight)
    for column in inputs.order.tolist():
        scale = scales[:, column // 8].double()
        code = (left[:, column] / scale).round().clamp(-8, 7)
        expected[:, column] = code.float()
        left -= ((left[:, column] - code * scale) / inverse[column, column])[:, None] * inverse[column]
        inverse = inverse - inverse[:, column, None] * inverse[column] / inverse[column, column]
        inverse[column, column] = 1.0
    assert (codes == expected).float().mean() > 0.99
    assert (codes - expected).abs().max() <= 1


def test_modules_that_read_one_input_are_found_in_the_order_of_their_run(tmp_path):
    model = load(write_checkpoint(tmp_path / "gated", "gated"))
    walk = model.new_layer_runner(2)
    state = walk.embed(random_ids(1, 2))
    groups, _ = group_by_input(walk, walk.layers[0], state)
    assert [set(names) for names in groups] == [
        {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "output_gate_proj", "lambda_proj")},
        {"self_attn.o_proj"},
        {"mlp.gate_proj", "mlp.up_proj"},
        {"mlp.down_proj"},
    ]


@in_one_test(
    ("rounding", "message"),
    [
        ({"name": "gptq", "inputs": "rouned"}, "inputs must be rounded or unrounded, got 'rouned'"),
        ({"name": "gptq", "inputs": "unrounded", "target": "model"}, "cannot be combined; leave out one"),
        ({"name": "gptq", "ordr": "activation"}, "unknown rounding key 'ordr'; did you mean 'order'"),
    ],
)
def test_options_that_cannot_be_are_refused(rounding, message):
    with pytest.raises(UsageError, match=message):
        Recipe.of(weights="4:g32", rounding=rounding)

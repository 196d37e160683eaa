"""Measures the mean square of every input channel of a model's weights on a text, for an importance matrix."""

from pathlib import Path

import torch
from torch import Tensor

from diffquant.checkpoints.calibration import read_calibration
from diffquant.checkpoints.corpora import Sources, open_corpora
from diffquant.checkpoints.gguf import to_gguf_name
from diffquant.checkpoints.imatrix import Imatrix, read_imatrix, write_imatrix
from diffquant.checkpoints.places import OffloadPlan
from diffquant.checkpoints.source import Source, open_source
from diffquant.errors import CheckpointError, NonFiniteError
from diffquant.model.causal import CausalModel
from diffquant.model.walk import split_into_batches
from diffquant.quantization.loading import load
from diffquant.quantization.roundings.gptq.layer_inputs import collect_inputs, iterate_grouped_layers
from diffquant.recipe import Recipe
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.names import first_few, option_name
from diffquant.support.progress import Progress, report_nothing


def write_importance(
    path: Path | str | Source,
    output: Path,
    *,
    text: Sources = None,
    tokens: int = 16384,
    window: int = 512,
    dtype: str = "float32",
    device: str = "auto",
    places: OffloadPlan | None = None,
    progress: Progress = report_nothing,
) -> Imatrix:
    """Measure the importance matrix of a 16-bit checkpoint, write it to a file, and return what the file contains.

    Weights of a Llama are named as in GGUF, for llama.cpp; those of other models as in the checkpoint.

    Args:
        output: file to write.
        text: files or datasets to read, as `read_calibration` accepts them; the bundled text by default.
        tokens: largest number of tokens to read.
        window: context length in tokens.
        dtype: dtype of the model.
        device: device to run on, unless `places` is given.
        places: devices, main memory and disk to spread the model over, or None to use one device.

    Raises:
        CheckpointError: the checkpoint is quantized, or cannot be read.
        UsageError: the text has no whole window, or there is no such device.
        NonFiniteError: the model computes NaN or infinity.
    """
    device = resolve_device(places.device if places else device)
    open_corpora(text)  # before the model is loaded
    source = open_source(path)
    if source.packed:
        raise CheckpointError(f"{source.path} is quantized; an imatrix is measured on the 16-bit checkpoint")
    tokenizer = source.tokenizer
    model = load(source, Recipe(), resolve_dtype(dtype, device), device, device_map=places)
    calibration = read_calibration(text, tokenizer, model.config, window, tokens)
    means = mean_squares(model, calibration.ids.to(model.device), progress)
    tokens_read = calibration.ids.numel()
    if wrong := [name for name, values in means.items() if not (values * tokens_read).float().isfinite().all()]:
        raise NonFiniteError(
            f"inputs of {first_few(wrong, ', ')} are NaN, infinite or too large to be squared; use "
            f"{option_name('dtype', 'float32')}, or inspect the checkpoint"
        )
    names = {name: source.adapter.source_name(f"{name}.weight") for name in means}
    if source.spec.maps == 1:
        names = {name: to_gguf_name(stored) for name, stored in names.items()}
    datasets = [each["name"] for each in calibration.record["sources"]]
    count, length = calibration.ids.shape
    named = {names[name]: values for name, values in means.items()}
    write_imatrix(output, named, source.model_type, datasets, count, length)
    return read_imatrix(output)


@torch.inference_mode()
def mean_squares(model: CausalModel, ids: Tensor, progress: Progress = report_nothing) -> dict[str, Tensor]:
    """Measure the mean square of each input channel of the linear modules in the layers, and of an untied head.

    Args:
        ids: token ids [N, T] of N windows.

    Returns:
        float64 [input channels] by the module's name, such as "model.layers.0.mlp.down_proj" or "lm_head".
    """
    means: dict[str, Tensor] = {}
    runner = model.new_layer_runner(ids.shape[1])
    states = [runner.embed(batch) for batch in split_into_batches(ids)]
    for number, (layer, readers) in enumerate(iterate_grouped_layers(model, ids)):
        sums = [torch.zeros((), dtype=torch.float64, device=ids.device)] * len(readers)
        for place, state in enumerate(states):
            seen, states[place] = collect_inputs(runner, layer, [names[0] for names in readers], state)
            sums = [each + _squares(seen[names[0]]) for each, names in zip(sums, readers, strict=True)]
        for total, names in zip(sums, readers, strict=True):
            means |= dict.fromkeys([f"model.layers.{number}.{name}" for name in names], (total / ids.numel()).cpu())
        progress(number + 1, len(runner.layers), "measuring inputs")
    if not model.model.architecture.tie_word_embeddings:
        normalized = (runner.decoder.normalize(runner.hidden_states(state)) for state in states)
        means["lm_head"] = (sum(map(_squares, normalized), torch.zeros(())) / ids.numel()).cpu()
    return means


def _squares(x: Tensor) -> Tensor:
    """Return the sums of squares [in] of inputs [..., in] in float64."""
    return x.double().square().flatten(0, -2).sum(0)

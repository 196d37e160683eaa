"""The model that lm-eval calls "diffquant". Import only where lm-eval is installed."""

from collections.abc import Sequence
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model

from diffquant.errors import UsageError
from diffquant.evals.defaults import batch_tokens_on
from diffquant.evals.protocols.harness_model import HarnessModel
from diffquant.evals.torch_model import TorchModel
from diffquant.loading import check_loadable, load
from diffquant.recipe import Recipe, RecipeLike
from diffquant.recipe.presets import PRESETS
from diffquant.source.places import DeviceMap, Places
from diffquant.source.source import Source, open_source
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.progress import progress_for


@register_model("diffquant")
class DiffQuantLM(HarnessModel):
    """A checkpoint under a recipe as a model of lm-eval, made of the texts that its command line passes.

        lm_eval --model diffquant --model_args pretrained=checkpoint,recipe=int4 --tasks hellaswag --batch_size auto

    lm-eval finds it by the entry points of group `lm_eval.models`; in versions without them importing this module is
    enough.
    """

    def __init__(
        self,
        pretrained: str | Path | Source,
        recipe: RecipeLike | None = None,
        scales: str | Path | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device_map: DeviceMap | None = None,
        offload_folder: str | Path | None = None,
    ) -> None:
        """Load the model.

        Args:
            pretrained: checkpoint folder, .gguf file, or ORG/NAME[@REVISION] on the hub.
            recipe: name of a preset or of a YAML file, a scheme of the weights such as "4:g32", or from Python what
                `Recipe.parse` takes; a quantized checkpoint's own by default.
            scales: file of ranges calibrated on the checkpoint, for static schemes.
            dtype: dtype of the model; "auto" is bfloat16 where it is native, else float32.
            device: device of the model; lm-eval's own default, "cuda:0", is the processor where CUDA is not there. A
                device map is in its place.
            batch_size: most sequences of the model's full length in one pass, whose tokens shorter ones share; "auto"
                is as many tokens as `diffquant eval` takes.
            max_batch_size: bound of `batch_size` where that is "auto".
            device_map, offload_folder: places of a model that is larger than one device, as `load` takes them.

        Raises:
            UsageError: the batch size is no number of 1 or more, or as `load` raises it.
            CheckpointError: the checkpoint cannot be read.
        """
        places = Places.of("auto", device_map, offload_folder)
        chosen = resolve_device(_device(device) if places is None else places.device)
        sequences = _sequences(batch_size)
        wanted = None if recipe is None else _recipe(recipe)
        source = pretrained if isinstance(pretrained, Source) else open_source(str(pretrained))
        check_loadable(source, [] if wanted is None else [wanted])
        self.loaded = load(source, wanted, resolve_dtype(dtype, chosen), chosen, scales=scales, device_map=places)
        model = TorchModel(self.loaded, source.tokenizer)
        length = model.max_length
        tokens = batch_tokens_on(chosen) if sequences is None else sequences * length
        if sequences is None and max_batch_size is not None:
            tokens = min(tokens, max_batch_size * length)
        super().__init__(model, tokens, progress_for("lm-eval"))

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        answers = super().loglikelihood(requests)
        self.loaded.require_fired()
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        answers = super().loglikelihood_rolling(requests)
        self.loaded.require_fired()
        return answers

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        answers = super().generate_until(requests)
        self.loaded.require_fired()
        return answers


def _device(device: str | None) -> str:
    """The device that was asked for; lm-eval's command line asks for "cuda:0" where nobody did."""
    return device if device and (device != "cuda:0" or torch.cuda.is_available()) else "auto"


def _recipe(given: RecipeLike) -> Recipe:
    if isinstance(given, str) and given in PRESETS:
        return Recipe.of(**PRESETS[given])
    if isinstance(given, str) and given.endswith((".yaml", ".yml")):
        return Recipe.read(Path(given))
    return Recipe.parse(given)


def _sequences(batch_size: int | str) -> int | None:
    """The sequences of a pass; None for "auto", which HFLM may be asked to find several times, as "auto:4"."""
    text = str(batch_size)
    if text.partition(":")[0] == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"batch_size is a number of 1 or more, or auto, got {batch_size!r}")
    return int(text)

"""The lm-eval model "diffquant", which scores with diffquant. Import it only if lm-eval is installed."""

from collections.abc import Sequence
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diffquant.checkpoints.places import DeviceMap, OffloadPlan
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.tokens import end_token
from diffquant.errors import UsageError
from diffquant.measure.language_model import LanguageModel, Request, RequestEncoder
from diffquant.measure.scoring import score
from diffquant.measure.task import batch_tokens_on
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import check_loadable, load
from diffquant.recipe import Recipe, RecipeLike
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.progress import Progress, progress_for

_MAX_GENERATED = 256


class HarnessModel(LM):
    """An lm-eval model whose scores equal those of lm-eval's HFLM.

    Args:
        model: model that computes the scores.
        batch_tokens: largest number of tokens per scoring pass.
    """

    def __init__(self, model: LanguageModel, batch_tokens: int, progress: Progress) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.batch_tokens = batch_tokens
        self.progress = progress
        self.encoder = RequestEncoder(model.tokenizer, model.max_length, model.vocabulary_size)
        self._device = model.device

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-probability and whether greedy decoding would produce it."""
        encoded = self.encoder.encode_requests(request.args for request in requests)
        answers = score(self.model, encoded, self.batch_tokens, self.progress)
        self._store("loglikelihood", requests, answers)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return the log-probability of each text; a request's arguments are the tuple (text,).

        Every token is predicted once, from as much context as fits.
        """
        windows = [self._windows(request.args[0]) for request in requests]
        scores = iter(score(self.model, [w for of_text in windows for w in of_text], self.batch_tokens, self.progress))
        totals = [sum(next(scores)[0] for _ in of_text) for of_text in windows]
        self._store("loglikelihood_rolling", requests, totals)
        return totals

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Generate a continuation for each (context, generation arguments), cut at the first stop sequence."""
        answers = []
        for done, request in enumerate(requests, 1):
            context, arguments = request.args
            answers.append(self._generate(context, dict(arguments)))
            self._store("generate_until", [request], answers[-1:])
            self.progress(done, len(requests), "generating")
        return answers

    def _store(self, kind: str, requests: Sequence[Instance], answers: Sequence[object]) -> None:
        """Put answers into lm-eval's cache."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def _windows(self, text: str) -> list[Request]:
        windows = get_rolling_token_windows(
            token_list=self.encoder.encode(text),
            prefix_token=self.encoder.prefix_token,
            max_seq_len=self.encoder.max_length,
            context_len=1,
        )
        return [Request(tuple(before), tuple(after)) for before, after in map(make_disjoint_window, windows)]

    def _generate(self, context: str, arguments: dict[str, object]) -> str:
        arguments = dict(normalize_gen_kwargs(arguments, _MAX_GENERATED))
        stops = handle_stop_sequences(arguments.pop("until", None), self.tokenizer.decode(end_token(self.tokenizer)))
        most_tokens = int(str(arguments.pop("max_gen_toks")))
        # Greedy decoding has no temperature, and transformers warns about one.
        sampling = {k: v for k, v in arguments.items() if arguments.get("do_sample") or k != "temperature"}
        room = self.encoder.max_length - most_tokens
        if room < 1:
            raise UsageError(
                f"max_gen_toks {most_tokens} leaves no tokens for a prompt: the model's context has "
                f"{self.encoder.max_length}; set fewer in the task's generation_kwargs"
            )
        ids = self.encoder.encode(context)[-room:]
        continuation = self.model.generate(ids, most_tokens, stops, sampling)
        text = self.tokenizer.decode(continuation, skip_special_tokens=True)
        answer: str = postprocess_generated_text(text, stops, None)
        return answer


@register_model("diffquant")
class DiffQuantLM(HarnessModel):
    """An lm-eval model of a checkpoint under a recipe, made from the arguments of lm-eval's command line.

        lm_eval --model diffquant --model_args pretrained=checkpoint,recipe=int4 --tasks hellaswag --batch_size auto

    lm-eval finds it through the entry points of group `lm_eval.models`. In versions that do not read them, import this
    module.
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
            recipe: name of a preset or of a YAML file, a scheme of the weights such as "4:g32", or in Python anything
                that `Recipe.parse` accepts; by default the recipe that a quantized checkpoint records.
            scales: file of ranges calibrated on the checkpoint, for static schemes.
            dtype: dtype of the model; "auto" is bfloat16 if the hardware supports it natively, else float32.
            device: device of the model. lm-eval's default, "cuda:0", means the CPU if CUDA is missing. Not used with a
                device map.
            batch_size: largest number of sequences of the model's full length per pass. Shorter sequences may use the
                same number of tokens. "auto" uses as many tokens as `diffquant eval`.
            max_batch_size: upper bound of `batch_size` if that is "auto".
            device_map, offload_folder: placement of a model that is larger than one device, as in `load`.

        Raises:
            UsageError: the batch size is not a number of 1 or more, or `load` raises it.
            CheckpointError: the checkpoint cannot be read.
        """
        places = OffloadPlan.of("auto", device_map, offload_folder)
        chosen = resolve_device(_device(device) if places is None else places.device)
        sequences = _sequences(batch_size)
        wanted = None if recipe is None else Recipe.parse(recipe)
        source = pretrained if isinstance(pretrained, Source) else open_source(str(pretrained))
        check_loadable(source, [] if wanted is None else [wanted])
        self.loaded = load(source, wanted, resolve_dtype(dtype, chosen), chosen, scales=scales, device_map=places)
        model = TorchModel(self.loaded, source.tokenizer)
        length = model.max_length
        tokens = batch_tokens_on(chosen) if sequences is None else sequences * length
        if sequences is None and max_batch_size is not None:
            tokens = min(tokens, max_batch_size * length)
        super().__init__(model, tokens, progress_for("lm-eval"))

    def _store(self, kind: str, requests: Sequence[Instance], answers: Sequence[object]) -> None:
        self.loaded.check_quantizers_ran()
        super()._store(kind, requests, answers)


def _device(device: str | None) -> str:
    """Return the requested device; "cuda:0" is lm-eval's default, also without CUDA."""
    return device if device and (device != "cuda:0" or torch.cuda.is_available()) else "auto"


def _sequences(batch_size: int | str) -> int | None:
    """Parse the number of sequences per pass; "auto" and HFLM's "auto:4" give None."""
    text = str(batch_size)
    if text.partition(":")[0] == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"batch_size must be 1 or more, or auto, got {batch_size!r}")
    return int(text)

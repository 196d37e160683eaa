"""A model whose weights a method quantizes, and what that costs its outputs on prose like gptq's and on other text."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from diffquant.benchmarks.measuring import forget_peak, measure_resident_bytes
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.texts import load_text, text_digest
from diffquant.errors import UsageError
from diffquant.measure.language_model import ModelOutputs
from diffquant.measure.protocols import hellaswag
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from research.studies.kv_results import KEPT, references_of, scores_of
from research.studies.model_reading import ModelReading
from research.studies.rounding_method import Method, reason


@dataclass(frozen=True)
class RoundingOptions:
    """Options of a measurement.

    Attributes:
        text: file with a text of two halves; the bundled text by default.
        characters: number of characters that are scored of the second half, and of HellaSwag's contexts.
        window: number of tokens the model sees at once, scored and read.
        tokens: number of tokens of the first half that are read.
        items: number of HellaSwag items; 0 for none.
        read: file with a text that is read in place of the first half.
        further: file with a third text, which is scored like the other two.
    """

    text: Path | None = None
    characters: int = 16384
    window: int = 512
    tokens: int = 16384
    items: int = 200
    read: Path | None = None
    further: Path | None = None


class Subject:
    """A model, its weights in float16, and what its outputs are compared with."""

    def __init__(self, path: Path, options: RoundingOptions) -> None:
        self.path, self.options = path, options
        text = load_text(options.text)
        self._read = load_text(options.read) if options.read else text[: len(text) // 2]
        self._texts = {
            "prose": text[len(text) // 2 :][: options.characters],
            "elsewhere": "\n".join(item.query for item in hellaswag.load_items())[: options.characters],
        }
        if options.further:
            self._texts["further"] = load_text(options.further, options.characters)
        # Keys of a row that has been scored on all texts.
        self._kept = (*KEPT, *list(self._texts)[1:])
        self._source = open_source(path)
        self._tokenizer = self._source.tokenizer
        available = len(self._tokenizer.encode(self._read, add_special_tokens=False))
        if available < options.tokens:
            raise UsageError(f"the text that is read has {available} tokens, fewer than --tokens {options.tokens}")
        self._model = load(self._source, Recipe(), torch.float32, "cpu")
        adapter = self._source.adapter
        self._weights = {
            name: (adapter.source_name(name), self._model.get_parameter(name).data.half())
            for name in adapter.architecture.linear_shapes()
        }
        for name, (_, weight) in self._weights.items():
            self._model.get_parameter(name).data = weight.float()
        self._reading = ModelReading(
            self._source, self._weights, options.read or options.text, options.tokens, options.window
        )
        self._items = hellaswag.load_items(limit=options.items) if options.items else []

    def settings(self) -> dict[str, Any]:
        """Settings that a result depends on: all but the number of items."""
        return {
            "model": self.path.name,
            "fingerprint": self._source.fingerprint,
            **{"text" if name == "prose" else name: text_digest(text) for name, text in self._texts.items()},
            "read": text_digest(self._read),
            "characters": len(self._texts["prose"]),
            "window": self.options.window,
            "tokens": self.options.tokens,
        }

    def lacking(self, former: Mapping[str, Any]) -> bool:
        """Whether a former result lacks something that is asked for."""
        return not self._is_scored(former) or former.get("items", 0) < len(self._items)

    def measured(self, method: Method | None, former: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers of a method, or why there are none; None is the model as it is."""
        # Computed before a method changes the weights.
        references = None if self._is_scored(former) else self._references
        if method is None:
            return {"bits": 16.0} | self._scores(former, references)
        try:
            with self._quantized(method) as facts:
                return facts | self._scores(former, references)
        except Exception as error:  # a library's own failure is its row, and the others go on
            if method.package is None:
                raise
            return {"missing": reason(error, method)}

    @contextmanager
    def _quantized(self, method: Method) -> Iterator[dict[str, Any]]:
        """Give the model a method's weights while open; yields what they store and lose."""
        bits = held = elements = 0
        errors: list[float] = []
        hooks: list[RemovableHandle] = []
        try:
            forget_peak()
            started = time.process_time()
            quantized = method.over(self._reading)
            seconds = time.process_time() - started
            for name, (source, weight) in self._weights.items():
                exact, started = weight.float(), time.process_time()
                made = quantized(source, weight)
                seconds += time.process_time() - started
                errors.append(float((made.values - exact).norm() / exact.norm()))
                self._model.get_parameter(name).data = made.values
                if made.product is not None:
                    hooks.append(self._multiply_by(name, made.product))
                bits, held, elements = bits + made.bits, held + made.held, elements + weight.numel()
            yield {
                "tier": method.tier,
                "bits": bits / elements,
                "held_bits": held / elements,
                "mean_relative_rms_error": sum(errors) / len(errors),
                "cpu_seconds": seconds,
                # Of the whole process, which holds the model twice besides.
                "peak_bytes": measure_resident_bytes()[0],
            }
        finally:
            for hook in hooks:
                hook.remove()
            for name, (_, weight) in self._weights.items():
                self._model.get_parameter(name).data = weight.float()

    def _multiply_by(self, name: str, product: Callable[[Tensor], Tensor]) -> RemovableHandle:
        """Have a linear layer multiply in a method's way."""
        layer = cast(torch.nn.Linear, self._model.get_submodule(name.removesuffix(".weight")))

        def output(_layer: torch.nn.Module, given: tuple[Tensor, ...], _output: Tensor) -> Tensor:
            y = product(given[0])
            return y if layer.bias is None else y + layer.bias

        hook: RemovableHandle = layer.register_forward_hook(output)
        return hook

    def _scores(self, former: Mapping[str, Any], references: Mapping[str, ModelOutputs] | None) -> dict[str, Any]:
        if references is None:
            scores = {key: former[key] for key in self._kept}
        else:
            model = TorchModel(self._model, self._tokenizer)
            by_text = scores_of(model, self._texts, self.options.window, references)
            scores = by_text.pop("prose") | by_text
        if former.get("items", 0) >= len(self._items):
            return scores | {key: former[key] for key in ("items", "acc_norm", "correct") if key in former}
        result = hellaswag.evaluate_hellaswag(TorchModel(self._model, self._tokenizer), self._items)
        correct = "".join("01"[int(item)] for item in result.values or ())
        return scores | {"items": result.n, "acc_norm": result.score, "correct": correct}

    @cached_property
    def _references(self) -> dict[str, ModelOutputs]:
        """States of the 16-bit model on the prose and on HellaSwag's contexts."""
        return references_of(TorchModel(self._model, self._tokenizer), self._texts, self.options.window)

    def _is_scored(self, row: Mapping[str, Any]) -> bool:
        return all(key in row for key in self._kept)

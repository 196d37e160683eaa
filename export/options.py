"""Options of an export; all contradictions among them are reported in one error."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import onnxruntime
from packaging.version import Version

from diffquant.errors import UsageError
from diffquant.onnx.files import PLAIN, PORTABLE, Layout
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.recipe.targets import parse_target_scheme, refusal
from diffquant.support.names import option_name

if TYPE_CHECKING:
    import torch

# Opset 23 has RMSNormalization; ONNX Runtime supports it from 1.23 on. In portable graphs it is written as several ops.
# From opset 18 on, reductions have their axes as an input, and Split has the attribute num_outputs.
DEFAULT_OPSET, PORTABLE_OPSET = 23, 18
IR_VERSION = 10
LOGIT_GRANULARITIES = ("row", "head", "pair", "tensor")
DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export to ONNX.

    Attributes:
        weights: scheme of the linears' weights if the checkpoint is not quantized; a quantized checkpoint keeps its
            schemes.
        kv_bits: width of the KV cache: 16 (the activations' type), or 8 or 4 with static per-channel scales.
        logits: scheme of the attention logits, whose quantization the graph simulates.
        dtype: type of activations, 16-bit weights and an unquantized cache.
        embed_bits: width of embedding and head: 16, or 8 for quantized ones.
        cache: whether the model has a KV cache as inputs and outputs.
        portable: whether transformers.js and optimum can read the folder. The graph then has no functions, files have
            the names that both expect, and config.json describes the model's inputs as a Llama's.
        accuracy_level: precision of matmuls with weights of up to 4 bits: 4 for int8 activations, 1 for float32
            activations. Weights of 5 to 8 bits always have int8 activations: ONNX Runtime has no other kernel for them.
        genai_device: device for onnxruntime-genai in genai_config.json: "cpu", "cuda" or "cuda:N".
        web: whether to add outputs from which attention maps can be computed, and web.json for pages that draw them.
    """

    weights: Scheme = FULL
    kv_bits: int = 16
    logits: Scheme = FULL
    dtype: str = "float32"
    embed_bits: int = 16
    cache: bool = True
    portable: bool = False
    accuracy_level: int = 4
    genai_device: str = "cpu"
    web: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.weights, Scheme) and isinstance(self.logits, Scheme)):
            raise UsageError("ExportOptions takes schemes as Scheme; for text use ExportOptions.parse(weights='4:g32')")
        problems = list(self._problems())
        if problems:
            raise UsageError(f"cannot export: {'; '.join(problems)}")

    @classmethod
    def parse(cls, weights: str = "16", logits: str = "16", **others: Any) -> "ExportOptions":
        """Return options, with schemes given as text.

        Args:
            weights: scheme of the weights, such as "4:g32"; "16" does not quantize.
            logits: scheme of the logits, such as "8:row"; "16" does not quantize.
            others: values of other attributes, by name.
        """
        return cls(
            weights=parse_target_scheme("weights", weights), logits=parse_target_scheme("logits", logits), **others
        )

    @property
    def opset(self) -> int:
        """The graph's version of the standard ONNX domain."""
        return PORTABLE_OPSET if self.portable else DEFAULT_OPSET

    @property
    def layout(self) -> Layout:
        """Paths of the model's files in the folder."""
        return PORTABLE if self.portable else PLAIN

    @property
    def torch_dtype(self) -> "torch.dtype":
        # Imported here, since running an exported folder reads its options without torch.
        import torch

        return {"float32": torch.float32, "float16": torch.float16}[self.dtype]

    @property
    def recipe(self) -> Recipe:
        """The schemes of weights, keys, values and logits in the graph, as a recipe."""
        cache = Scheme.parse(self.kv_bits, default="static")
        return Recipe(weights=self.weights, k=cache, v=cache, logits=self.logits)

    @property
    def has_custom_matmuls(self) -> bool:
        """Whether matmuls with int8 activations are nodes of diffquant's op, for which the native library has kernels.

        The kernels need float32 activations and run only on the CPU. A browser cannot load the library.
        """
        return self.genai_device == "cpu" and not self.web and not self.portable and self.dtype == "float32"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"weights": str(self.weights), "logits": str(self.logits), "opset": self.opset}

    def _problems(self) -> Iterator[str]:
        if self.kv_bits not in (16, 8, 4):
            yield f"no kernel reads a {self.kv_bits!r}-bit KV cache; {option_name('kv')} takes 16, 8 or 4"
        if self.embed_bits not in (16, 8):
            yield f"no kernel reads {self.embed_bits}-bit embeddings; {option_name('embed')} takes 16 or 8"
        if self.dtype not in DTYPES:
            yield f"unknown dtype {self.dtype!r}; choose from {', '.join(DTYPES)}"
        if self.accuracy_level not in (1, 4):
            yield f"accuracy level {self.accuracy_level} is not 1 (float32 activations) or 4 (int8 activations)"
        for what, scheme in (("weights", self.weights), ("logits", self.logits)):
            if reason := refusal(what, scheme):
                yield reason
            if scheme.format.integer_refusal:
                yield f"{what} at {scheme}: {scheme.format.integer_refusal}"
        if self.logits.quantizes and self.logits.granularity not in LOGIT_GRANULARITIES:
            yield f"logits per {self.logits.granularity} cannot be exported; use {', '.join(LOGIT_GRANULARITIES)}"
        if others := [each.name for each in self.logits.transforms if each.name != "shift"]:
            yield f"logits with {others[0]} are not supported, as the operator rounds each map separately; omit it"
        if not re.fullmatch("cpu|cuda(:[0-9]+)?", self.genai_device):
            yield f"{option_name('genai_device')} takes cpu, cuda or cuda:N, not {self.genai_device!r}"
        if not self.cache and self.genai_device != "cpu":
            yield (
                f"onnxruntime-genai needs a KV cache: leave out {option_name('cache', False)} or "
                f"{option_name('genai_device')}"
            )
        if not self.cache and self.kv_bits < 16:
            yield f"{option_name('kv', self.kv_bits)} and {option_name('cache', False)} contradict each other"
        if self.web:
            yield from self._web_problems()

    def _web_problems(self) -> Iterator[str]:
        if not self.cache or self.kv_bits < 16:
            yield (
                f"{option_name('web')} reads the keys in a float32 KV cache: leave out "
                f"{option_name('cache', False)} and {option_name('kv')}"
            )
        if self.portable:
            yield f"{option_name('web')} needs the model next to web.json: leave out {option_name('portable')}"
        if self.dtype != "float32":
            yield f"{option_name('web')} is float32: leave out {option_name('dtype')}"
        if self.logits.quantizes:
            yield f"{option_name('web')} rounds logits in the page: leave out {option_name('logits')}"


def check_runtime(options: ExportOptions) -> None:
    """Check that the installed ONNX Runtime can load a model with these options.

    Raises:
        UsageError: the installed version is too old; the message names the oldest that can load the model.
    """
    floor = oldest_runtime(options)
    if Version(onnxruntime.__version__).release[:2] < Version(floor).release:
        cache = f" with a {options.kv_bits}-bit KV cache" if options.kv_bits < 16 else ""
        raise UsageError(f"a model{cache} needs ONNX Runtime {floor}; installed is {onnxruntime.__version__}")


def oldest_runtime(options: ExportOptions, has_stacked_codes: bool = False) -> str:
    """Return the oldest ONNX Runtime version that loads a model with these options, such as "1.23".

    Args:
        has_stacked_codes: whether experts' weights are quantized and stacked, so that the graph gathers from codes.
    """
    if options.kv_bits < 16:
        return "1.27"
    gathers_codes = options.embed_bits < 16 or has_stacked_codes
    return "1.23" if not options.portable or gathers_codes else "1.18"

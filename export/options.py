"""Options of an export; every contradiction among them is named at once."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import onnxruntime

from diffquant.errors import UsageError
from diffquant.export.files import PLAIN, PORTABLE, Layout
from diffquant.recipe import Recipe
from diffquant.scheme import FULL, Scheme
from diffquant.support.spelling import spelled

if TYPE_CHECKING:
    import torch

# RMSNormalization became standard in opset 23, which ONNX Runtime takes from 1.23 on; earlier ones spell it out.
DEFAULT_OPSET, NEWEST_OPSET = 23, 26
# Reductions take their axes as an input, and Split its number of outputs, from 18 on.
_OLDEST_OPSET = 18
IR_VERSION = 10
LOGIT_GRANULARITIES = ("row", "head", "pair", "tensor")
DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class ExportOptions:
    """How a checkpoint becomes an ONNX model.

    Attributes:
        weights: scheme of a plain checkpoint's linears; a quantized one keeps its own.
        kv_bits: width of the KV cache: 16 (the activations' type), 8 or 4, with static scales a channel.
        logits: scheme of the attention logits, which the graph simulates.
        dtype: type of activations, 16-bit weights and an unquantized cache.
        embed_bits: width of embedding and head: 16, or 8 for codes.
        cache: whether the model takes and returns a KV cache.
        opset: version of the standard domain; 0 takes 23, and in a portable graph the oldest that has its ops.
        portable: whether the folder is for readers beside ONNX Runtime: no function, their names of files, and a
            config.json that describes the model's inputs as a Llama's.
        accuracy_level: precision of products with codes of 4 bits: 4 multiplies int8 activations, 1 float32 ones. Codes
            of 5 to 8 bits are multiplied with int8 activations either way: ONNX Runtime has no other kernel for them.
        genai_device: device that genai_config.json names to onnxruntime-genai: "cpu", "cuda" or "cuda:N".
        web: whether the model also gives what its attention maps are computed of, and the folder a description for
            pages that draw them.
    """

    weights: Scheme = FULL
    kv_bits: int = 16
    logits: Scheme = FULL
    dtype: str = "float32"
    embed_bits: int = 16
    cache: bool = True
    opset: int = 0
    portable: bool = False
    accuracy_level: int = 4
    genai_device: str = "cpu"
    web: bool = False

    def __post_init__(self) -> None:
        if not self.opset:
            object.__setattr__(self, "opset", _OLDEST_OPSET if self.portable else DEFAULT_OPSET)
        problems = list(self._problems())
        if problems:
            raise UsageError(f"cannot export: {'; '.join(problems)}")

    @classmethod
    def parse(cls, weights: str = "16", logits: str = "16", **others: Any) -> "ExportOptions":
        """Options with schemes in their text form."""
        of_weights, of_logits = Scheme.parse(weights, "g32", "weights"), Scheme.parse(logits, "row", "logits")
        return cls(weights=of_weights, logits=of_logits, **others)

    @property
    def layout(self) -> Layout:
        """Where the folder has its files."""
        return PORTABLE if self.portable else PLAIN

    @property
    def torch_dtype(self) -> "torch.dtype":
        # Here, since who runs an exported folder reads its options without torch.
        import torch

        return {"float32": torch.float32, "float16": torch.float16}[self.dtype]

    @property
    def recipe(self) -> Recipe:
        """The schemes that the graph computes with."""
        cache = Scheme.parse(self.kv_bits, default="static")
        return Recipe(weights=self.weights, k=cache, v=cache, logits=self.logits)

    @property
    def has_own_products(self) -> bool:
        """Whether products that round activations are an op of this project's, which the native library has kernels of.

        They read float32 and run on the processor; a page in a browser has no such library.
        """
        return self.genai_device == "cpu" and not self.web and not self.portable and self.dtype == "float32"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"weights": str(self.weights), "logits": str(self.logits)}

    def _problems(self) -> Iterator[str]:
        if self.kv_bits not in (16, 8, 4):
            yield f"no kernel reads a {self.kv_bits}-bit KV cache; {spelled('kv')} takes 16, 8 or 4"
        if self.embed_bits not in (16, 8):
            yield f"no kernel gathers {self.embed_bits}-bit embeddings; {spelled('embed')} takes 16 or 8"
        if self.dtype not in DTYPES:
            yield f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}"
        if self.accuracy_level not in (1, 4):
            yield f"accuracy level {self.accuracy_level} is not 1 (float32 activations) or 4 (int8 activations)"
        if not _OLDEST_OPSET <= self.opset <= NEWEST_OPSET:
            yield f"opset {self.opset} is not within {_OLDEST_OPSET} to {NEWEST_OPSET}"
        if self.weights.quantizes and (refusal := self.weights.sharing.refusal("weights")):
            yield f"weights {refusal}"
        for what, scheme in (("weights", self.weights), ("logits", self.logits)):
            if scheme.format.integer_refusal:
                yield f"{what} at {scheme}: {scheme.format.integer_refusal}"
        if self.logits.quantizes and self.logits.granularity not in LOGIT_GRANULARITIES:
            yield f"logits per {self.logits.granularity} cannot be exported; use {', '.join(LOGIT_GRANULARITIES)}"
        if self.logits.alike:
            yield "the operator rounds each map by itself; leave out alike"
        if not re.fullmatch("cpu|cuda(:[0-9]+)?", self.genai_device):
            yield f"{spelled('genai_device')} takes cpu, cuda or cuda:N, not {self.genai_device!r}"
        if not self.cache and self.genai_device != "cpu":
            yield (
                f"onnxruntime-genai needs a KV cache: leave out {spelled('cache', False)} or {spelled('genai_device')}"
            )
        if not self.cache and self.kv_bits < 16:
            yield f"{spelled('kv', self.kv_bits)} and {spelled('cache', False)} contradict each other"
        if self.web:
            yield from self._web_problems()

    def _web_problems(self) -> Iterator[str]:
        if not self.cache or self.kv_bits < 16:
            yield (
                f"{spelled('web')} reads the keys in a float32 KV cache: leave out {spelled('cache', False)} and "
                f"{spelled('kv')}"
            )
        if self.portable:
            yield f"the page of {spelled('web')} finds the model beside web.json: leave out {spelled('portable')}"
        if self.opset < DEFAULT_OPSET:
            yield f"{spelled('web')} rotates queries by an operator of opset {DEFAULT_OPSET}"
        if self.dtype != "float32":
            yield f"{spelled('web')} is float32: leave out {spelled('dtype')}"
        if self.logits.quantizes:
            yield f"{spelled('web')} rounds logits in the page: leave out {spelled('logits')}"


def check_runtime(options: ExportOptions) -> None:
    """Refuse what the installed ONNX Runtime cannot load.

    Raises:
        UsageError: it cannot load such a model; the message says which version can.
    """
    problems = []
    newest = _newest_opset()
    if options.opset > newest:
        problems.append(f"takes opset {newest} at most, not {options.opset}")
    if options.kv_bits < 16 and _runtime_version() < (1, 27):
        problems.append(f"has no {options.kv_bits}-bit KV cache; 1.27 has")
    if problems:
        raise UsageError(f"the installed ONNX Runtime {onnxruntime.__version__} {' and '.join(problems)}")


def runtime_floor(options: ExportOptions, has_stacked_codes: bool = False) -> str:
    """Oldest ONNX Runtime that loads the model; `make test-readers` opens folders of each with it.

    Args:
        has_stacked_codes: whether experts are codes, of which the graph gathers a token's.
    """
    if options.kv_bits < 16:
        return "1.27"
    gathers_codes = options.embed_bits < 16 or has_stacked_codes
    return "1.23" if options.opset >= DEFAULT_OPSET or gathers_codes else "1.18"


def _newest_opset() -> int:
    """Largest opset of the standard domain that the installed runtime loads, found by asking it."""
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [value], [result])
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 4
    for opset in range(NEWEST_OPSET, _OLDEST_OPSET - 1, -1):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION)
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), quiet, providers=["CPUExecutionProvider"])
        except Exception:  # the runtime's own exception types differ between its versions
            continue
        return opset
    return _OLDEST_OPSET - 1


def _runtime_version() -> tuple[int, int]:
    major, minor, *_ = onnxruntime.__version__.split(".")
    return int(major), int(minor)

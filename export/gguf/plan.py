"""The plan of an export to GGUF: the file's metadata, and a ggml type that stores each tensor without loss."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType, Metadata

from diffquant.checkpoints.gguf import OWN_KEY, PLAIN_TYPES, to_gguf_name
from diffquant.checkpoints.gguf_config import SIZES, WIDTHS
from diffquant.checkpoints.gguf_rope import FACTORS, rope_metadata
from diffquant.checkpoints.source import Source
from diffquant.errors import CheckpointError
from diffquant.model.architecture import TransformerArchitecture
from diffquant.onnx.gguf.vocabulary import add_vocabulary
from diffquant.onnx.graph.matrix import Matrix, check_not_requantized, open_matrix
from diffquant.recipe.numbers.absmax import check_finite
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.support.installation import versions
from diffquant.support.names import first_few, option_name

BLOCK = 32
_BLOCKS = {
    "4": GGMLQuantizationType.Q4_0,
    "5": GGMLQuantizationType.Q5_0,
    "8": GGMLQuantizationType.Q8_0,
    "iq4_nl": GGMLQuantizationType.IQ4_NL,
    "iq4_xs": GGMLQuantizationType.IQ4_XS,
}
_LICENCE = ("license", "license_name", "license_link")


@dataclass(frozen=True, eq=False)
class GgufPlan:
    """A GGUF file to write.

    Attributes:
        source: checkpoint to export.
        writer: writer with the complete header.
        vectors: float32 data of norms and RoPE frequency factors, by their names in the file.
        matrices: weights [out, in] by their names in the file, with rows in the file's order; they are stored after the
            vectors.
        kinds: ggml type of each matrix, by its name in the file.
        notes: sentences for the user on what the file does not contain.
    """

    source: Source
    writer: GGUFWriter
    vectors: Mapping[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]
    matrices: Mapping[str, Matrix]
    kinds: Mapping[str, GGMLQuantizationType]
    notes: tuple[str, ...]

    @property
    def types(self) -> dict[str, int]:
        """Number of tensors of each ggml type, by the type's name."""
        return dict(Counter([*(kind.name for kind in self.kinds.values()), *("F32" for _ in self.vectors)]))

    @property
    def main_type(self) -> str:
        """Name of the ggml type that stores the most weights."""
        return _main_type(self.matrices, self.kinds)

    def rows_and_row_bytes(self, name: str) -> tuple[int, int]:
        """Return the number of rows of the matrix with this name, and the stored bytes of a row."""
        (rows, width), (block, nbytes) = self.matrices[name].shape, GGML_QUANT_SIZES[self.kinds[name]]
        return rows, width // block * nbytes


def plan_gguf(
    source: Source,
    weights: Scheme = FULL,
    embedding_and_head: Scheme = FULL,
    dtype: torch.dtype | None = None,
    schemes: Mapping[str, Scheme] | None = None,
) -> GgufPlan:
    """Check that a checkpoint can be a GGUF file, and return the plan of the file.

    Args:
        weights: scheme of the linears if the checkpoint is not quantized.
        embedding_and_head: scheme of embedding and head if the checkpoint is not quantized.
        dtype: dtype of matrices that are not quantized; by default the checkpoint's.
        schemes: scheme of each module by the checkpoint's name, 16 bits for others; replaces `weights` and
            `embedding_and_head` if given.

    Raises:
        CheckpointError: llama.cpp cannot run the model, or no ggml type stores some weights; the message names all
            reasons.
        UsageError: `weights` quantizes a checkpoint that is quantized already.
    """
    architecture, name_of = source.architecture, source.adapter.source_name
    check_not_requantized(source, weights)
    if problems := list(_problems(source)):
        raise CheckpointError(f"{source.path} cannot be a GGUF file: {'; '.join(problems)}")
    layout = replace(source.spec.layout, head_order="adjacent", channel_order="interleaved")
    linears, config, writer = architecture.linear_shapes(), architecture.config, GGUFWriter(None, "llama")
    matrices, vectors = {}, {}
    for name, parameter in architecture.parameters.items():
        if len(parameter.shape) == 1:
            vectors[to_gguf_name(name)] = source.read(name)
            check_finite(vectors[to_gguf_name(name)], name_of(name))
        elif name != "lm_head.weight" or not architecture.tie_word_embeddings:
            by_kind = weights if name in linears else embedding_and_head
            own = by_kind if schemes is None else schemes.get(name_of(name).removesuffix(".weight"), FULL)
            matrices[to_gguf_name(name)] = open_matrix(source, name, own, layout)
    kinds = _kinds(source, matrices, dtype)
    try:
        rope, factors = rope_metadata(config.rope_parameters, source.spec.head_dim // 2)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path} cannot be a GGUF file: {error}") from error
    sizes = {key: getattr(config, ours) for ours, key in SIZES.items()}
    sizes |= dict.fromkeys(WIDTHS, source.spec.head_dim)
    for key, value in ({f"llama.{key}": value for key, value in sizes.items()} | rope).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else add)(key, value)
    _add_origin(writer, source, _main_type(matrices, kinds))
    notes = add_vocabulary(writer, source, matrices["token_embd.weight"].shape[0])
    if factors is not None:
        vectors[FACTORS] = torch.from_numpy(factors)
    simulated = [
        f"{target} {' or '.join(texts)}" for target in LAYER_TARGETS if (texts := source.recipe.rounding_texts(target))
    ]
    if simulated:
        notes.append(f"a GGUF file cannot store the recipe's {', '.join(simulated)}, which only diffquant applies")
    if inputs := source.recipe.rounding_texts("activations"):
        notes.append(
            f"llama.cpp rounds activations by its own rules, to 8 bits in blocks, in place of {' or '.join(inputs)}"
        )
    arrays = {name: vector.float().numpy() for name, vector in vectors.items()}
    plan = GgufPlan(source, writer, arrays, matrices, kinds, tuple(notes))
    for name, values in arrays.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for name in matrices:
        shape = plan.rows_and_row_bytes(name)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), kinds[name])
    return plan


def _problems(source: Source) -> Iterator[str]:
    """Yield the reasons why llama.cpp cannot compute the model as a Llama."""
    architecture, spec = source.architecture, source.spec
    if spec.maps > 1 or type(architecture) is not TransformerArchitecture:
        yield f"no engine that reads GGUF runs {source.model_type} ({spec.attention_name}); a Llama can be exported"
        return
    if architecture.hidden_act != "silu":
        yield f"its activation is {architecture.hidden_act}, and a Llama's is silu"
    if biased := [key for key in ("attention_bias", "mlp_bias") if getattr(architecture, key)]:
        yield f"it has {' and '.join(biased)}, which are not written"
    if spec.value_dim != spec.head_dim or spec.output_gate or spec.post_norm != "none" or spec.rope == "none":
        yield "its attention has gates, norms, widths or positions that a Llama's does not have"


def _kinds(
    source: Source, matrices: Mapping[str, Matrix], dtype: torch.dtype | None
) -> dict[str, GGMLQuantizationType]:
    """Choose the ggml type that stores each matrix without loss."""
    plain = {stored: kind for kind, stored in PLAIN_TYPES.items()}
    kinds: dict[str, GGMLQuantizationType] = {}
    refused: dict[str, list[str]] = defaultdict(list)
    for name, matrix in matrices.items():
        scheme, width = matrix.scheme, matrix.shape[1]
        if scheme.quantizes and (scheme.format.name not in _BLOCKS or (scheme.granularity_size or BLOCK) % BLOCK):
            refused[str(scheme)].append(matrix.stored_name)
        elif scheme.quantizes and width % (BLOCK * scheme.format.scales_per_step):
            refused[f"{scheme} in rows of {width}"].append(matrix.stored_name)
        elif scheme.quantizes:
            kinds[name] = _BLOCKS[scheme.format.name]
        elif (stored := dtype or source.checkpoint.tensors[matrix.stored_name].dtype) in plain:
            kinds[name] = plain[stored]
        else:
            refused[f"{stored}, without {option_name('dtype', 'float32')}"].append(matrix.stored_name)
    if refused:
        listed = "; ".join(f"{what} (of {first_few(names, ', ')})" for what, names in refused.items())
        raise CheckpointError(
            f"no GGUF type stores {listed} without loss. GGUF blocks have codes of 4, 5 or 8 bits with one scale per "
            f"{BLOCK} values, as in 4:g{BLOCK}, 8:row and iq4_nl, and a row must be a multiple of {BLOCK} (256 for "
            f"iq4_xs); when you quantize, keep other weights at 16 bits with {option_name('overrides', 'PATTERN=16')}"
        )
    return kinds


def _main_type(matrices: Mapping[str, Matrix], kinds: Mapping[str, GGMLQuantizationType]) -> str:
    weights: Counter[str] = Counter()
    for name, matrix in matrices.items():
        weights[kinds[name].name] += matrix.elements
    return weights.most_common(1)[0][0]


def _add_origin(writer: GGUFWriter, source: Source, main_type: str) -> None:
    """Add the model's name, license, languages and base models, from its model card."""
    carried = source.checkpoint.front_matter
    bases, languages = (_texts(carried.get(key)) for key in ("base_model", "language"))
    license_, license_name, link = (", ".join(_texts(carried.get(key))) or None for key in _LICENCE)
    Metadata(
        name=source.checkpoint.name,
        license=license_,
        license_name=license_name,
        license_link=link,
        languages=languages or None,
        base_models=[{"name": b.rpartition("/")[2], "repo_url": f"https://huggingface.co/{b}"} for b in bases] or None,
    ).set_gguf_meta_model(writer)
    writer.add_type("model")
    writer.add_file_type(LlamaFileType["ALL_F32" if main_type == "F32" else f"MOSTLY_{main_type}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_string(OWN_KEY, versions()["diffquant"])


def _texts(entry: object) -> list[str]:
    """Return the texts of a model card's entry, which may be a list or a single text."""
    return list(map(str, entry if isinstance(entry, list) else [entry] if entry else []))

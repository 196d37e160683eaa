"""Names and shapes of a DiffTransformer's parameters, without building one."""

from typing import TYPE_CHECKING

from diffquant.family.heads import PROJECTIONS
from diffquant.family.spec import DiffSpec
from diffquant.model.architecture import Architecture
from diffquant.model.mlp import activation_named

if TYPE_CHECKING:
    from diffquant.model.config import DiffTransformerConfig

    Config = Architecture | DiffTransformerConfig

Shape = tuple[int, ...]

LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def linear_shapes(config: "Config") -> dict[str, Shape]:
    """Shape [out, in] of each linear weight that a recipe's `weights` applies to, by full name."""
    return {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config.num_hidden_layers)
        for name, shape in (_attention_linears(config) | _mlp_linears(config)).items()
    }


def parameter_shapes(config: "Config") -> dict[str, Shape]:
    """Shape of each parameter, by full name; a tied head is not one."""
    width = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer_parameters(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def _layer_parameters(config: "Config") -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for linears, biased in (
        (_attention_linears(config), config.attention_bias),
        (_mlp_linears(config), config.mlp_bias),
    ):
        for name, (out, width) in linears.items():
            shapes[f"{name}.weight"] = (out, width)
            if biased:
                shapes[f"{name}.bias"] = (out,)
    activation = activation_named(config.hidden_act)
    shapes |= {f"mlp.act_fn.{name}": (len(values),) for name, values in activation.parameters.items()}
    shapes |= {f"self_attn.{name}": shape for name, shape in _gates_and_norm(config).items()}
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (config.hidden_size,)
    return shapes


def _attention_linears(config: "Config") -> dict[str, Shape]:
    spec, width = config.diff_spec, config.hidden_size
    return {
        **{f"self_attn.{projection}": (spec.layout.height(projection), width) for projection in PROJECTIONS},
        "self_attn.o_proj": (width, spec.pairs * spec.value_dim),
    }


def _mlp_linears(config: "Config") -> dict[str, Shape]:
    width, inner = config.hidden_size, config.intermediate_size
    return {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}


def _gates_and_norm(config: "Config") -> dict[str, Shape]:
    spec: DiffSpec = config.diff_spec
    shapes: dict[str, Shape] = {}
    if spec.lam == "exp":
        shapes |= dict.fromkeys(LAMBDA_VECTORS, (spec.head_dim,))
    if spec.gates:
        shapes["lambda_proj.weight"] = (spec.gates, config.hidden_size)
    if spec.output_gate:
        shapes["output_gate_proj.weight"] = (spec.pairs * spec.value_dim, config.hidden_size)
    if spec.post_norm == "affine":
        shapes["subln.weight"] = (spec.value_dim,)
    return shapes

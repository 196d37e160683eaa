"""The architecture that `SambaY` runs, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffquant.family.lam import LAMBDA_VECTORS
from diffquant.model.architecture import Architecture, Shape
from diffquant.model.sambay.kinds import Kind, kinds_of, layers_of_targets

if TYPE_CHECKING:
    from diffquant.model.sambay.modeling import SambaY

# Parameters that the reference computes with in float32; those of Mamba go into an exponential.
_WIDE = (".A_log", ".D", *(f".{name}" for name in LAMBDA_VECTORS))


@dataclass(frozen=True, kw_only=True)
class SambaYArchitecture(Architecture):
    """A decoder whose layers differ, as `kinds.kind_of` says. The modules are named as the checkpoints name them.

    Attributes:
        layer_norm_eps: epsilon of the LayerNorms.
        sliding_window: number of newest tokens that windowed layers see; None for all.
        mamba_d_state: N, width of a channel's state.
        mamba_d_conv: number of tokens that the convolution sees.
        mamba_expand: channels E of Mamba and memory over the hidden width.
        mamba_dt_rank: width of what the step sizes are made of.
    """

    layer_norm_eps: float
    sliding_window: int | None
    mamba_d_state: int
    mamba_d_conv: int
    mamba_expand: int
    mamba_dt_rank: int

    def new_model(self) -> "SambaY":
        from diffquant.model.sambay.config import SambaYConfig
        from diffquant.model.sambay.modeling import SambaY

        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "diff_spec"}
        return SambaY(SambaYConfig(**values, spec=self.diff_spec.to_dict()))

    def parameter_shapes(self) -> dict[str, Shape]:
        width = self.hidden_size
        norm: dict[str, Shape] = {"weight": (width,), "bias": (width,)}
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab_size, width)}
        for layer, kind in enumerate(kinds_of(self.num_hidden_layers)):
            shapes |= {f"model.layers.{layer}.{name}.weight": s for name, s in self._layer_linears(kind).items()}
            shapes |= {f"model.layers.{layer}.attn.{name}": s for name, s in self._mixer_vectors(kind).items()}
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes |= {f"model.layers.{layer}.{name}.{part}": shape for part, shape in norm.items()}
        shapes |= {f"model.final_layernorm.{part}": shape for part, shape in norm.items()}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        return shapes

    def linear_shapes(self) -> dict[str, Shape]:
        return {
            f"model.layers.{layer}.{name}.weight": shape
            for layer, kind in enumerate(self.layer_kinds)
            for name, shape in self._layer_linears(kind).items()
        }

    @property
    def layer_kinds(self) -> Sequence[Kind]:
        return kinds_of(self.num_hidden_layers)

    @property
    def can_rotate_cache(self) -> bool:
        return False

    @property
    def target_layers(self) -> Mapping[str, Sequence[int]]:
        return layers_of_targets(self.num_hidden_layers)

    def attention_name(self, layer: int) -> str:
        return f"model.layers.{layer}.attn.inner_cross_attn"

    def is_wide(self, parameter: str) -> bool:
        return parameter.endswith(_WIDE)

    @property
    def _inner(self) -> int:
        return self.mamba_expand * self.hidden_size

    def _layer_linears(self, kind: Kind) -> dict[str, Shape]:
        """Shapes of a layer's quantizable weights; the projection of Mamba's steps is small and stays as it is."""
        width, inner, layout = self.hidden_size, self._inner, self.diff_spec.layout
        mlp = {"mlp.fc1": (2 * self.intermediate_size, width), "mlp.fc2": (width, self.intermediate_size)}
        if kind == "mamba":
            mixed = self.mamba_dt_rank + 2 * self.mamba_d_state
            return {
                "attn.in_proj": (2 * inner, width),
                "attn.x_proj": (mixed, inner),
                "attn.out_proj": (width, inner),
                **mlp,
            }
        if kind == "gated memory":
            return {"attn.in_proj": (inner, width), "attn.out_proj": (width, inner), **mlp}
        heights = [layout.height("q_proj"), layout.height("k_proj"), layout.height("v_proj")]
        rows = heights[0] if kind == "cross attention" else sum(heights)
        return {"attn.Wqkv": (rows, width), "attn.out_proj": (width, heights[0]), **mlp}

    def _mixer_vectors(self, kind: Kind) -> dict[str, Shape]:
        """Shapes of a mixer's parameters that are not quantized, below `attn`."""
        inner, state = self._inner, self.mamba_d_state
        if kind == "mamba":
            return {
                "conv1d.weight": (inner, 1, self.mamba_d_conv),
                "conv1d.bias": (inner,),
                "dt_proj.weight": (inner, self.mamba_dt_rank),
                "dt_proj.bias": (inner,),
                "A_log": (inner, state),
                "D": (inner,),
            }
        if kind == "gated memory":
            return {}
        spec = self.diff_spec
        return {
            "Wqkv.bias": (self._layer_linears(kind)["attn.Wqkv"][0],),
            "out_proj.bias": (self.hidden_size,),
            **{f"inner_cross_attn.{name}": (spec.head_dim,) for name in LAMBDA_VECTORS},
            "inner_cross_attn.subln.weight": (spec.value_dim,),
        }

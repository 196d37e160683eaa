"""DEX checkpoints: a Llama with a trained matrix on its attention outputs, which folds into o_proj.

For the selected heads h of a layer, the output O_h becomes O_h − λ·(M·O_h + b). Behind the softmax all is linear, so
o_proj's columns of head h become W_h·(I − λM) and its bias loses λ·Σ W_h·b: what remains is a plain Llama.

No weights are published. Read is a config.json with model_type "dex_llama" and Llama's keys, and in each layer's
`self_attn.dex.` either `proj.weight` [d, d], which is M, or `weight` [d, d], which multiplies from the right and is Mᵀ;
`lambda_learn`, one number; if there are any `proj.bias` or `bias` [d], `head_mask` [query heads] and `step`, the number
of training steps, which must have reached `dex_steps` of config.json: before, λ is still mixed with its initial value.

Source: arXiv 2505.16333.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.formats.reader import Checkpoint, TensorInfo
from diffquant.model.adapters import adapter_for
from diffquant.numbers.absmax import check_finite
from diffquant.support.listing import first_few

DEX = "dex_llama"
_PART = ".dex."
_PARTS = ("weight", "proj.weight", "bias", "proj.bias", "lambda_learn", "head_mask", "step")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def folded_columns(rows: Tensor, mixing: Tensor, lam: float, selected: Tensor) -> Tensor:
    """Rows of o_proj.weight with DEX folded in: W_h·(I − λM) for each selected head.

    Args:
        rows: [n, heads * d], float32 or float64.
        mixing: M [d, d] in the dtype of `rows`.
        selected: [heads], bool.
    """
    heads = rows.reshape(len(rows), len(selected), len(mixing))
    return (heads - lam * selected[:, None] * (heads @ mixing)).flatten(-2)


class DexCheckpoint(Checkpoint):
    """A DEX checkpoint presented as the equivalent Llama.

    o_proj is read in float32 at least, and written in the checkpoint's own dtype.

    Raises:
        CheckpointError: parts of DEX are missing, unknown or misshapen, or λ is still annealed; the first are named.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self.path, self._stored = stored.path, stored
        plain = {key: value for key, value in stored.config.items() if key not in ("dex_steps", "auto_map")}
        self.config = plain | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        architecture = adapter_for(self.config).architecture
        self._heads, self._head_dim = architecture.num_attention_heads, architecture.head_dim
        self._blocks = [f"model.layers.{layer}.self_attn" for layer in range(architecture.num_hidden_layers)]
        self._check()
        self.tensors = {name: self._info(name, info) for name, info in stored.tensors.items() if _PART not in name}
        if not self.config.get("attention_bias") and any(self._bias(block) is not None for block in self._blocks):
            self.config["attention_bias"] = True
            self.tensors |= self._added_biases

    def read(self, name: str) -> Tensor:
        return self._folded(name, self._stored.read) if name in self._stored.tensors else self._added(name)

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        if name not in self._stored.tensors or name.endswith("o_proj.bias"):
            return self.read(name)[rows]
        return self._folded(name, lambda stored_name: self._stored.read_rows(stored_name, rows))

    def weight_files(self) -> list[Path]:
        return self._stored.weight_files()

    def write_side_files(self, folder: Path) -> None:
        self._stored.write_side_files(folder)

    def written_dtype(self, name: str) -> torch.dtype:
        return self._stored.tensors[name if name in self._stored.tensors else _weight_of(name)].dtype

    @property
    def stored_nbytes(self) -> int:
        return self._stored.stored_nbytes

    def _folded(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        data = read(name)
        block, _, part = name.rpartition(".o_proj.")
        if block not in self._blocks:
            return data
        wide = data.to(self.tensors[name].dtype)
        return self._folded_bias(block, wide) if part == "bias" else self._folded_rows(block, wide)

    def _folded_rows(self, block: str, rows: Tensor) -> Tensor:
        return folded_columns(rows, self._mixing(block).to(rows.dtype), self._lam(block), self._selected(block))

    def _folded_bias(self, block: str, bias: Tensor) -> Tensor:
        """o_proj's bias [out] without λ·Σ W_h·b over the selected heads."""
        shift = self._bias(block)
        if shift is None:
            return bias
        weight = self._stored.read(f"{block}.o_proj.weight").to(bias.dtype)
        columns = (self._selected(block)[:, None] * shift.to(bias.dtype)).flatten()
        return bias - self._lam(block) * (weight @ columns)

    def _added(self, name: str) -> Tensor:
        """A bias that only the Llama has: zero, except for o_proj's, which takes in DEX's bias."""
        info = self.tensors[name]
        zero = torch.zeros(info.shape, dtype=info.dtype)
        block, _, part = name.rpartition(".o_proj.")
        return self._folded_bias(block, zero) if part else zero

    @property
    def _added_biases(self) -> dict[str, TensorInfo]:
        weights = [f"{block}.{projection}.weight" for block in self._blocks for projection in _PROJECTIONS]
        infos = {name: self.tensors[name] for name in weights if name in self.tensors}
        return {
            f"{name.removesuffix('.weight')}.bias": TensorInfo(info.dtype, info.shape[:1], info.shard)
            for name, info in infos.items()
        }

    def _info(self, name: str, info: TensorInfo) -> TensorInfo:
        if ".o_proj." not in name:
            return info
        return TensorInfo(torch.promote_types(info.dtype, torch.float32), info.shape, info.shard)

    def _part(self, block: str, *parts: str) -> Tensor | None:
        names = [f"{block}{_PART}{part}" for part in parts]
        return next((self._stored.read(name) for name in names if name in self._stored.tensors), None)

    def _mixing(self, block: str) -> Tensor:
        linear, right = self._part(block, "proj.weight"), self._part(block, "weight")
        return linear if linear is not None else _there(right).T

    def _bias(self, block: str) -> Tensor | None:
        return self._part(block, "proj.bias", "bias")

    def _lam(self, block: str) -> float:
        return float(_there(self._part(block, "lambda_learn")))

    def _selected(self, block: str) -> Tensor:
        mask = self._part(block, "head_mask")
        return torch.ones(self._heads, dtype=torch.bool) if mask is None else mask.flatten() != 0

    def _check(self) -> None:
        problems = [problem for block in self._blocks for problem in self._problems(block)]
        known = {f"{block}{_PART}{part}" for block in self._blocks for part in _PARTS}
        problems += [
            f"{name} is no part of DEX" for name in self._stored.tensors if _PART in name and name not in known
        ]
        if problems:
            raise CheckpointError(f"{self.path} is not a DEX checkpoint that folds into a Llama: {first_few(problems)}")

    def _problems(self, block: str) -> list[str]:
        shapes = {part: self._shape(block, part) for part in _PARTS}
        square = [self._head_dim, self._head_dim]
        problems = []
        if (shapes["weight"] is None) == (shapes["proj.weight"] is None):
            problems.append(f"{block}{_PART} has not one of weight and proj.weight")
        if shapes["lambda_learn"] is None:
            problems.append(f"{block}{_PART}lambda_learn is missing")
        sizes: Mapping[str, list[list[int]]] = {
            "weight": [square],
            "proj.weight": [square],
            "bias": [[self._head_dim]],
            "proj.bias": [[self._head_dim]],
            "lambda_learn": [[], [1]],
            "head_mask": [[self._heads], [self._heads, 1], [1, self._heads, 1, 1]],
            "step": [[], [1]],
        }
        misshapen = [part for part, shape in shapes.items() if shape is not None and shape not in sizes[part]]
        problems += [f"{block}{_PART}{part} is {shapes[part]}, not {sizes[part][0]}" for part in misshapen]
        return problems or self._mask_problem(block) or self._annealing_problem(block)

    def _mask_problem(self, block: str) -> list[str]:
        mask = self._part(block, "head_mask")
        other = [] if mask is None else [value for value in mask.flatten().tolist() if value not in (0, 1)]
        return [f"{block}{_PART}head_mask holds {other[0]:g}, and selects with 0 and 1"] if other else []

    def _annealing_problem(self, block: str) -> list[str]:
        for part in _PARTS:
            data = self._part(block, part)
            if data is not None and data.is_floating_point():
                check_finite(data, f"{block}{_PART}{part}")
        step, steps = self._part(block, "step"), self._stored.config.get("dex_steps")
        if step is None:
            return []
        if type(steps) is not int:
            return [f"{block}{_PART}step is {int(step)}, and config.json has no dex_steps to hold it against"]
        if int(step) < steps:
            return [
                f"{block}{_PART}step is {int(step)} of dex_steps {steps}: λ is still half annealed; train to the end"
            ]
        return []

    def _shape(self, block: str, part: str) -> list[int] | None:
        info = self._stored.tensors.get(f"{block}{_PART}{part}")
        return None if info is None else list(info.shape)


def as_llama(checkpoint: Checkpoint) -> Checkpoint:
    """Convert a DEX checkpoint to the equivalent Llama; return any other unchanged."""
    return DexCheckpoint(checkpoint) if checkpoint.config.get("model_type") == DEX else checkpoint


def _there(data: Tensor | None) -> Tensor:
    """A part of DEX that the check found earlier."""
    if data is None:
        raise CheckpointError("a part of DEX vanished from the checkpoint while it was read; open it again")
    return data


def _weight_of(bias: str) -> str:
    return f"{bias.removesuffix('.bias')}.weight"

"""Attention logits of vision DIFF models at low bits, beside the Transformers they were matched with.

    python examples/vision_pairs.py differential-10M/model.safetensors classic-10M/model.safetensors --images FOLDER
    python examples/vision_pairs.py DiffCLIP_ViTB16_CC12M/checkpoint_best.pt ViTB16-CC12M/checkpoint_best.pt

Both pairs are public: keell0renz/diff-transformer-for-vision (classic-10M and differential-10M), and hammh0a's DiffCLIP
with its baseline (ViT-B/16, on CC3M and CC12M), whose vision towers are read. It prints how large the logits are, and
how far each scheme moves what a model says of an image. Names and shapes are those of the two projects' code, and no
published weights were at hand. Without `--images` it runs on noise, which tries the program and not the models.

Needs diffquant and Pillow.
"""

import argparse
from collections.abc import Mapping
from math import exp
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear, normalize, rms_norm

from diffquant.attention import attend
from diffquant.errors import CheckpointError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm, lam_from_vectors
from diffquant.recipe.scheme import FULL, Scheme

SCHEMES = [f"{bits}:{granularity}" for granularity in ("tensor", "head", "row", "row:shift") for bits in (8, 6, 4, 3)]
# Mean and deviation by which a picture's channels are normalized, and its side, by the width of a patch.
_PICTURES = {
    8: ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 64),
    16: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224),
}
_POST_EPS = 1e-5


class Vision:
    """A vision Transformer, differential or not, of either project.

    Attributes:
        tensors: its weights by name.
        is_clip: whether it is the vision tower of a CLIP; else a classifier of 64-pixel images.
        logits: scheme of the attention logits.
        calls: attention calls of the last images.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        tensors = {name.removeprefix("module.").removeprefix("visual."): each for name, each in tensors.items()}
        self.is_clip = "pos_embed" in tensors
        self._layers = "blocks" if self.is_clip else "layers" if "layers.0.norm1.weight" in tensors else "transformer"
        needed = ("patch_embed.proj.weight", "cls_token", "norm.weight", f"{self._layers}.0.norm1.weight")
        missing = [name for name in needed if name not in tensors]
        if missing:
            raise CheckpointError(f"these are not the weights of a known vision Transformer: no {', '.join(missing)}")
        self.tensors = {name: each.float() for name, each in tensors.items()}
        if self.patch not in _PICTURES:
            known = " or ".join(map(str, _PICTURES))
            raise CheckpointError(f"patch_embed.proj.weight has patches {self.patch} pixels wide; choose from {known}")
        self.depth = len({name.split(".")[1] for name in tensors if name.startswith(f"{self._layers}.")})
        self.is_diff = f"{self._layers}.0.attn.lambda_q1" in tensors
        self.logits = FULL
        self.calls: list[AttentionCall] = []

    @property
    def patch(self) -> int:
        return self.tensors["patch_embed.proj.weight"].shape[-1]

    @torch.inference_mode()
    def answers(self, images: Tensor) -> Tensor:
        """Class logits [B, classes] of images [B, 3, side, side], or a CLIP's image embedding [B, D] of unit length."""
        t = self.tensors
        self.calls = []
        patches = conv2d(images, t["patch_embed.proj.weight"], t["patch_embed.proj.bias"], stride=self.patch)
        x = torch.cat([t["cls_token"].expand(len(images), -1, -1), patches.flatten(2).mT], 1)
        x = x + t["pos_embed" if self.is_clip else "pos_embedding"]
        for layer in range(self.depth):
            at = f"{self._layers}.{layer}"
            x = x + self._attention(self._norm(x, f"{at}.norm1"), layer)
            first, second = ("mlp.fc1", "mlp.fc2") if self.is_clip else ("mlp.0", "mlp.3")
            x = x + self._linear(gelu(self._linear(self._norm(x, f"{at}.norm2"), f"{at}.{first}")), f"{at}.{second}")
        x = self._norm(x[:, 0], "norm")
        if not self.is_clip:
            return self._linear(x, "head")
        if "image_projection" in t:
            x = x @ t["image_projection"]
        return normalize(x, dim=-1)

    def _attention(self, x: Tensor, layer: int) -> Tensor:
        at = f"{self._layers}.{layer}.attn"
        if self.is_diff:
            q, k, v = (self._linear(x, f"{at}.{name}_proj") for name in "qkv")
            width = len(self.tensors[f"{at}.lambda_q1"])
            values = 2 * width
        else:
            packed = f"{at}.qkv" if self.is_clip else f"{at}.in_proj"
            q, k, v = self._linear(x, packed).chunk(3, -1)
            width = values = x.shape[-1] // (12 if self.is_clip else 8)
        q, k = (each.unflatten(-1, (-1, width)).transpose(1, 2) for each in (q, k))
        maps = 2 if self.is_diff else 1
        call = AttentionCall(
            # A pair's two heads lie beside each other.
            [q[:, each::maps] for each in range(maps)],
            [k[:, each::maps] for each in range(maps)],
            v.unflatten(-1, (-1, values)).transpose(1, 2),
            self._lam(layer) if self.is_diff else None,
            scale=width**-0.5,
            mask=Mask(explicit=torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool)),
            post=self._post(layer) if self.is_diff else None,
            logits=self.logits,
        )
        self.calls.append(call)
        out = f"{at}.proj" if f"{at}.proj.weight" in self.tensors else f"{at}.out_proj"
        return self._linear(attend(call, "auto").transpose(1, 2).flatten(2), out)

    def _lam_init(self, layer: int) -> float:
        return 0.8 if self.is_clip else 0.8 - 0.6 * exp(-0.3 * layer)

    def _lam(self, layer: int) -> Tensor:
        at = f"{self._layers}.{layer}.attn.lambda_"
        q1, k1, q2, k2 = (self.tensors[at + name] for name in ("q1", "k1", "q2", "k2"))
        return lam_from_vectors(q1, k1, q2, k2, init=self._lam_init(layer))

    def _post(self, layer: int) -> PairNorm:
        name = "diff_norm" if self.is_clip else "subln"
        weight = self.tensors[f"{self._layers}.{layer}.attn.{name}.weight"]
        return PairNorm(_POST_EPS, weight, 1 - self._lam_init(layer))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        if bias is None:
            return rms_norm(x, weight.shape, weight)
        # timm's layers have 1e-6; DiffCLIP's own have torch's default.
        return layer_norm(x, weight.shape, weight, bias, 1e-6 if self.is_clip and not self.is_diff else 1e-5)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        # torch's nn.MultiheadAttention writes in_proj_weight where others write in_proj.weight.
        joint = "_" if f"{name}_weight" in self.tensors else "."
        return linear(x, self.tensors[f"{name}{joint}weight"], self.tensors.get(f"{name}{joint}bias"))


def logit_sizes(calls: list[AttentionCall]) -> tuple[float, float]:
    """Largest and median |Q·Kᵀ·scale| of the calls that a model made."""
    each = torch.cat(
        [(q @ k.mT * call.scale).abs().flatten() for call in calls for q, k in zip(call.q, call.k, strict=True)]
    )
    return float(each.max()), float(each.median())


def distance(model: Vision, full: Tensor, rounded: Tensor) -> float:
    """Mean KL in nats from a classifier's full answers, or mean 1 - cosine of a CLIP's embeddings."""
    if model.is_clip:
        return float((1 - (full * rounded).sum(-1)).mean())
    logp, logq = full.log_softmax(-1), rounded.log_softmax(-1)
    return float((logp.exp() * (logp - logq)).sum(-1).mean())


def read_model(file: Path) -> Vision:
    """A model from a .safetensors file, or from a torch checkpoint, of which nothing but plain data is read."""
    if file.suffix == ".safetensors":
        return Vision(load_file(file))
    # SLIP's trainer, which names its files checkpoint_best.pt, puts its command line beside the weights.
    with torch.serialization.safe_globals([argparse.Namespace]):
        stored = torch.load(file, map_location="cpu", weights_only=True)
    return Vision(stored.get("state_dict", stored))


def names_of(files: list[Path]) -> list[str]:
    """Each model's folder, where that tells them apart, else its file."""
    folders = [file.parent.name for file in files]
    return folders if all(folders) and len({*folders}) == len(files) else [str(file) for file in files]


def read_images(folder: Path | None, patch: int, count: int) -> Tensor:
    """Images [B, 3, side, side] as a model with this patch width was trained on; noise without a folder."""
    mean, deviation, side = _PICTURES[patch]
    if folder is None:
        return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))
    from PIL import Image

    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".jpg", ".jpeg", ".png"))[:count]
    if not files:
        raise SystemExit(f"{folder} has no .jpg or .png files")
    pictures = []
    for file in files:
        with Image.open(file) as image:
            small = image.convert("RGB").resize((side, side))
            pictures.append(torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(side, side, 3))
    channels = torch.stack(pictures).permute(0, 3, 1, 2) / 255
    return (channels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)


def main() -> None:
    """Print a table with a column a model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help=".safetensors or .pt file")
    parser.add_argument("--images", type=Path, help="folder of pictures; noise by default")
    parser.add_argument("--count", type=int, default=16, help="how many images (default: 16)")
    options = parser.parse_args()
    models = dict(zip(names_of(options.models), map(read_model, options.models), strict=True))
    rows: dict[str, list[str]] = {name: [] for name in ("largest |logit|", "median |logit|", *SCHEMES)}
    for model in models.values():
        images = read_images(options.images, model.patch, options.count)
        full = model.answers(images)
        top, median = logit_sizes(model.calls)
        rows["largest |logit|"].append(f"{top:.1f}")
        rows["median |logit|"].append(f"{median:.2f}")
        for scheme in SCHEMES:
            model.logits = Scheme.parse(scheme)
            rows[scheme].append(f"{distance(model, full, model.answers(images)):.2e}")
    width = max(26, 2 + max(map(len, models)))
    print("logits at        " + "".join(f"{name:>{width}}" for name in models))
    for name, values in rows.items():
        print(f"{name:17}" + "".join(f"{value:>{width}}" for value in values))
    said = {"1 - cosine of the embeddings" if model.is_clip else "KL in nats" for model in models.values()}
    print(f"Distances from 16 bits: {', '.join(sorted(said))}, mean over {len(images)} images.")


if __name__ == "__main__":
    main()

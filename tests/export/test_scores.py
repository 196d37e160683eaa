"""What evaluations score of an exported folder, held to the torch model of the same recipe in nats an item."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.checkpoints.ranges import write_ranges
from diffquant.errors import CheckpointError
from diffquant.measure.language_model import LanguageModel, RequestEncoder
from diffquant.measure.protocols import hellaswag
from diffquant.measure.scoring import score
from diffquant.measure.torch_model import TorchModel
from diffquant.onnx import ExportOptions, export
from diffquant.onnx.options import LOGIT_GRANULARITIES
from diffquant.onnx.runtime.scoring import OnnxLanguageModel
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.quantization.loading import load
from examples.shots.constrained import choose
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test

LOGITS = ["16", *(f"4:{shared}{shift}" for shared in LOGIT_GRANULARITIES for shift in ("", ":shift"))]
OPTIONS = [{"logits": logits, "cache": cache} for logits in LOGITS for cache in (True, False)] + [
    {"kv_bits": 8},
    {"kv_bits": 4},
    {"kv_bits": 8, "logits": "4:tensor"},
]
ITEMS = hellaswag.load_items(limit=3)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "diff-v2"
    write_checkpoint(folder, "unilm-v2", vocab_size=tiny_lm.WORDS, max_position_embeddings=512)
    # Logits beyond what shift clips have one scale, whatever shares it: these are smaller.
    tensors = load_file(folder / "model.safetensors")
    smaller = {name: x * 0.2 if name.endswith("q_proj.weight") else x for name, x in tensors.items()}
    save_file(smaller, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def requests():
    encoder = RequestEncoder(tiny_lm.tokenizer(), 512, tiny_lm.WORDS)
    return encoder.encode_requests((item.query, f" {ending}") for item in ITEMS for ending in item.endings)


def models(source, folder, given) -> tuple[LanguageModel, LanguageModel]:
    """A checkpoint's export, run by ONNX Runtime, and its twin in torch."""
    options = ExportOptions.parse(**given)
    ranges = calibrate_cache(source) if options.kv_bits < 16 else None
    export(source, folder / "out", options, ranges=ranges)
    scales = None
    if ranges is not None:
        scales = folder / "scales.safetensors"
        write_ranges(scales, ranges)
    return OnnxLanguageModel(OnnxModel(folder / "out", 1, every_position=True)), TorchModel(
        load(source, options.recipe, scales=scales)
    )


@in_one_test("given", OPTIONS)
def test_an_export_scores_and_chooses_as_torch_does(source, requests, tmp_path, given):
    ours, oracle = models(source, tmp_path, given)
    gaps = [abs(a[0] - b[0]) for a, b in zip(score(ours, requests), score(oracle, requests), strict=True)]
    # In nats. A value of the cache that lies between two codes may fall to either.
    assert max(gaps) < (0.1 if "kv_bits" in given else 1e-3)
    rng = torch.Generator().manual_seed(5)
    draw = lambda count, length: torch.randint(2, tiny_lm.WORDS, (count, length), generator=rng).tolist()  # noqa: E731
    asked = draw(1, 60)[0], draw(8, 7) + draw(8, 5), [[first, *rest] for first in (3, 4) for rest in draw(4, 3)]
    assert choose(ours, *asked) == choose(oracle, *asked)


def test_an_export_without_a_cache_gives_none(source, tmp_path):
    export(source, tmp_path / "out", ExportOptions(cache=False))
    with pytest.raises(CheckpointError, match="was exported without a cache; export it again without cache=False"):
        OnnxLanguageModel(OnnxModel(tmp_path / "out", 1, every_position=True)).new_cache()

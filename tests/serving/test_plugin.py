"""What vLLM computes of the family by the plugin, and of the folders alone, is what diffquant computes."""

import pytest
import torch

import diffquant
from tests.serving.answers import CLOSE, expected, furthest
from tests.serving.checkpoints import FAMILY, write_served

# At 8 bits with a cache that vLLM does not have. 3 and 6 bits have rows whose words codes straddle.
RECIPES = {"16": {"kv": "8:row"}, "8": {"weights": "8:row"}, "4": {"weights": "4:g32"}}
OTHER_WIDTHS = {
    bits: {"weights": f"{bits}:{shared}"}
    for bits, shared in {"2": "g32", "3": "g32", "5": "g32", "6": "row", "7": "g32"}.items()
}
LENGTH = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of each source under each recipe, by source and width."""
    root = tmp_path_factory.mktemp("folders")
    made = {}
    for source in FAMILY:
        checkpoint = write_served(root / source, source)
        for bits, recipe in (RECIPES | (OTHER_WIDTHS if source == "unilm-v2" else {})).items():
            made[source, bits] = root / f"{source}-{bits}"
            diffquant.quantize(checkpoint, made[source, bits], recipe)
    return made


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 320, (length,), generator=generator).tolist() for length in (LENGTH, 7)]


@pytest.fixture(scope="module")
def by_plugin(engine, folders, prompts):
    jobs = [{"folder": str(folder), "prompts": prompts} for folder in folders.values()]
    answers, said = engine(jobs)
    return dict(zip(folders, answers, strict=True)), said


@pytest.mark.parametrize("bits", RECIPES)
@pytest.mark.parametrize("source", FAMILY)
def test_the_plugin_computes_what_diffquant_computes(by_plugin, folders, prompts, source, bits):
    difference, is_same = furthest(by_plugin[0][source, bits][0], expected(folders[source, bits], prompts))
    assert difference < CLOSE
    assert is_same


@pytest.mark.parametrize("bits", OTHER_WIDTHS)
def test_every_width_is_served(by_plugin, folders, prompts, bits):
    difference, is_same = furthest(by_plugin[0]["unilm-v2", bits][0], expected(folders["unilm-v2", bits], prompts))
    assert difference < CLOSE
    assert is_same


def test_the_recipes_cache_is_said_to_be_left_out(by_plugin):
    assert "k 8:row, v 8:row of the recipe are not done by vLLM: K and V are stored as auto" in by_plugin[1]


def test_weights_are_loaded_without_a_warning_for_each(by_plugin):
    assert "Attempted to load weight" not in by_plugin[1]


@pytest.fixture(scope="module")
def by_folder(engine, folders, prompts):
    jobs = [
        {
            "folder": str(folders[source, bits]),
            "prompts": prompts,
            "options": {"trust_remote_code": True, "model_impl": "transformers", "dtype": dtype},
        }
        for source, bits, dtype in ALONE
    ]
    return dict(zip(ALONE, engine(jobs, VLLM_PLUGINS="none")[0], strict=True))


ALONE = [*((source, "16", "float32") for source in FAMILY), ("unilm-v1", "4", "bfloat16")]


@pytest.mark.parametrize("source", FAMILY)
def test_the_folder_alone_computes_the_same(by_folder, folders, prompts, source):
    difference, is_same = furthest(by_folder[source, "16", "float32"][0], expected(folders[source, "16"], prompts))
    assert difference < CLOSE
    assert is_same

"""What vLLM computes of the family by the plugin, and of the folders alone, is what diffquant computes."""

import pytest
import torch

import diffquant
from tests.vllm.answers import check, check_low_bits, expected
from tests.vllm.checkpoints import FAMILY, KINDS, write_served
from tests.vllm.conftest import needs_avx512

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
    check("plugin", source, bits, by_plugin[0][source, bits], expected(folders[source, bits], prompts))


@pytest.mark.parametrize("bits", OTHER_WIDTHS)
def test_every_width_is_served(by_plugin, folders, prompts, bits):
    check("plugin", "unilm-v2", bits, by_plugin[0]["unilm-v2", bits], expected(folders["unilm-v2", bits], prompts))


def test_the_recipes_cache_is_said_to_be_left_out(by_plugin):
    assert "k 8:row, v 8:row of the recipe are not applied: K and V are stored as float32" in by_plugin[1]


def test_weights_are_loaded_without_a_warning_for_each(by_plugin):
    assert "Attempted to load weight" not in by_plugin[1]


# Settings by which vLLM's own embeddings had other angles than transformers', or none.
STRETCHED = {"rope_theta": 300.0, "original_max_position_embeddings": 128}
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(16)], "long_factor": [2.0] * 16}
ROPES = {
    "longrope": STRETCHED | FACTORS | {"rope_type": "longrope", "attention_factor": 1.5},
    "longrope by factor": STRETCHED | FACTORS | {"rope_type": "longrope", "factor": 32.0},
    "yarn": STRETCHED | {"rope_type": "yarn", "factor": None, "beta_fast": None, "attention_factor": None},
    "linear": {"rope_type": "linear", "factor": 4, "rope_theta": 300.0},
}


@pytest.fixture(scope="module")
def stretched(engine, prompts, tmp_path_factory):
    """Checkpoints with stretched angles, and what the engine answers to them, by the kind of angles."""
    root = tmp_path_factory.mktemp("stretched")
    folders = {kind: write_served(root / kind, "diffllama", rope_parameters=rope) for kind, rope in ROPES.items()}
    answers, _ = engine([{"folder": str(folder), "prompts": prompts} for folder in folders.values()])
    return folders, dict(zip(folders, answers, strict=True))


@pytest.mark.parametrize("kind", ROPES)
def test_stretched_angles_are_those_of_transformers(stretched, prompts, kind):
    folders, answers = stretched
    check(f"{kind} angles", "diffllama", "16", answers[kind], expected(folders[kind], prompts))


@pytest.fixture(scope="module")
def by_folder(engine, folders, prompts, low_attention, prose):
    """Answers of vLLM's transformers backend without the plugin, which has no float32 for packed weights, by source."""
    options = {"trust_remote_code": True, "model_impl": "transformers"}
    jobs = {source: {"folder": str(folders[source, "16"]), "prompts": prompts, "options": options} for source in FAMILY}
    for kind, folder in low_attention.items():
        jobs[kind] = {"folder": str(folder), "prompts": [prose], "options": options | {"dtype": "bfloat16"}}
    return dict(zip(jobs, engine(list(jobs.values()), VLLM_PLUGINS="none")[0], strict=True))


@pytest.mark.parametrize("source", FAMILY)
def test_the_folder_alone_computes_the_same(by_folder, folders, prompts, source):
    check("folder", source, "16", by_folder[source], expected(folders[source, "16"], prompts))


@needs_avx512
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_alone_loses_no_more_at_4_bits_than_our_own_bfloat16(by_folder, low_attention, prose, kind):
    check_low_bits(low_attention[kind], by_folder[kind], prose)

"""What vLLM computes of the models whose decoders are diffquant's own is what diffquant computes."""

import pytest
import torch

import diffquant
from diffquant.serving.plan import WITHOUT_PACKING
from tests.vllm.answers import CLOSE, check, check_low_bits, expected
from tests.vllm.checkpoints import OWN, write_served
from tests.vllm.conftest import needs_avx512

# In float32 vLLM's Linears unpack; experts and what is read directly are unpacked as they are loaded.
RECIPES = {"16": {"kv": "8:row"}, "8": {"weights": "8:row"}, "4": {"weights": "4:g32"}}
# Written as in the makers' release of Motif-3.
RELEASE = {"weights": "16", "overrides": {"*.experts.*": "nvfp4"}}
READ = {"phi4flash": "*.dt_proj", "motif3": "*.lambda_proj"}
CHUNKED = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True, "enable_prefix_caching": True}
CASES = [*((source, bits) for source in OWN for bits in RECIPES), ("motif3", "nvfp4 experts")]
# Beyond the windows, within them, and one that is a prompt's whole.
LENGTHS, NEW = (70, 40, 7, 1), 32
# In float32 a random Motif-3's logits, of up to 26, are off by 0.007 of float64's in our own model.
NEAR = {"phi4flash": CLOSE, "motif3": 5e-3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of each source under each recipe, by source and width."""
    root, made = tmp_path_factory.mktemp("own"), {}
    for source in OWN:
        checkpoint = write_served(root / source, source)
        for bits, recipe in RECIPES.items():
            made[source, bits] = root / f"{source}-{bits}"
            read = {"overrides": {READ[source]: "8:row"}} if bits == "8" else {}
            diffquant.quantize(checkpoint, made[source, bits], recipe | read)
    made["motif3", "nvfp4 experts"] = root / "motif3-release"
    diffquant.quantize(root / "motif3", root / "motif3-release", RELEASE)
    return made


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 320, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def long():
    """Prompts that begin alike and end in blocks of their own."""
    start = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(4)).tolist()
    return [start + [number] * (3 + 7 * number) for number in range(3)]


@pytest.fixture(scope="module")
def text():
    return torch.randint(0, 320, (120,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def answers(engine, folders, prompts, long, text):
    """What the engine answers to every job, by the job's name."""
    jobs = {
        key: {"folder": str(folders[key]), "prompts": prompts, "max_tokens": NEW, "options": OWN[key[0]]}
        for key in CASES
    }
    jobs["motif3", "nvfp4 experts"]["options"] = OWN["motif3"] | {"hf_overrides": WITHOUT_PACKING}
    again = {"folder": str(folders["phi4flash", "16"]), "prompts": long, "rounds": 2, "reads_prompts": False}
    jobs["chunked"] = again | {"options": CHUNKED}
    compiled = {"enforce_eager": False, "compilation_config": {"mode": 1}}
    jobs["in parts"] = {"folder": str(folders["motif3", "16"]), "prompts": prompts[-1:]}
    for source in OWN:
        low = {"folder": str(folders[source, "4"]), "prompts": [text]}
        jobs[f"bfloat16 {source}"] = low | {"options": OWN[source] | {"dtype": "bfloat16"}}
        job = {"folder": str(folders[source, "16"]), "prompts": prompts[-1:]}
        jobs[f"compiled {source}"] = job | {"options": OWN[source] | compiled}
        jobs[f"ranks {source}"] = job | {"options": OWN[source] | {"tensor_parallel_size": 2}}
    return dict(zip(jobs, engine(list(jobs.values()))[0], strict=True))


@pytest.mark.parametrize(("source", "bits"), CASES)
def test_the_plugin_computes_what_diffquant_computes(answers, folders, prompts, source, bits):
    check(
        "plugin", source, bits, answers[source, bits], expected(folders[source, bits], prompts, new=NEW), NEAR[source]
    )


def test_chunks_and_shared_beginnings_change_nothing(answers, folders, long):
    """Mamba's states are those at the end of a block, from which a later request with the same beginning goes on."""
    check("chunked", "phi4flash", "16", answers["chunked"], expected(folders["phi4flash", "16"], long))
    assert all(answer["cached"] for answer in answers["chunked"][1])


@needs_avx512
@pytest.mark.parametrize("source", OWN)
def test_four_bits_lose_no_more_than_in_our_own_bfloat16(answers, folders, text, source):
    """Through vLLM's own kernel for 4 bits, which `serve` has where a processor can."""
    check_low_bits(folders[source, "4"], answers[f"bfloat16 {source}"], text)


@pytest.mark.parametrize("source", OWN)
def test_what_is_not_served_is_refused_by_name(answers, source):
    assert "is served without compilation: pass --enforce-eager" in answers[f"compiled {source}"]
    assert "is served on one rank" in answers[f"ranks {source}"]
    assert "vLLM reads a prompt of Motif-3 at once" in answers["in parts"]

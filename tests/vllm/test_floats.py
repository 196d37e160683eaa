"""What vLLM on a processor answers to folders of floats and of experts: it knows them, and says what it lacks."""

import pytest
import torch

import diffquant
from tests.checkpoints.test_experts import write_mixture
from tests.support.checkpoints import write_checkpoint
from tests.vllm.answers import record
from tests.vllm.checkpoints import write_served

# The scheme of weights, and what vLLM 0.32 on a processor ends with.
ANSWERS = {
    "e4m3:channel": "Failed to find a kernel that can implement the ScaledMM linear layer",
    "e4m3:tensor": "Failed to find a kernel that can implement the ScaledMM linear layer",
    "e4m3:b32": "Failed to find a kernel that can implement the ScaledMM linear layer",
    "nvfp4": "NVFP4 kernel MarlinNvFp4LinearKernel is not supported",
    "mxfp4": "Failed to find a kernel that can implement the MXFP4 linear layer",
    "mxfp8": "Failed to find a kernel that can implement the MXFP8 linear layer",
    # It has no scheme for these, and says so otherwise.
    "mxfp6": "Only num_bits in (8) are supported",
    "e4m3:g32": "'NoneType' object has no attribute 'num_bits'",
}
SOURCES = ("llama", "unilm-v2")
SIZES = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 320, "head_dim": 32}
SIZES |= {"max_position_embeddings": 256}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a Llama, which vLLM knows, and of a model that the plugin has, by source and scheme."""
    root, made = tmp_path_factory.mktemp("floats"), {}
    for source in SOURCES:
        plain = root / source
        if source == "llama":
            write_checkpoint(plain, source, torch.bfloat16, num_attention_heads=4, num_key_value_heads=2, **SIZES)
        else:
            write_served(plain, source)
        for scheme in ANSWERS:
            made[source, scheme] = root / f"{source} {scheme}"
            diffquant.quantize(plain, made[source, scheme], {"weights": scheme})
    return made


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A mixture of experts, packed."""
    root = tmp_path_factory.mktemp("experts")
    write_mixture(root / "plain", "qwen3_moe")
    diffquant.quantize(root / "plain", root / "low", {"weights": "4:g32"}, weights_only=True)
    return root / "low"


@pytest.fixture(scope="module")
def answers(engine, folders, experts):
    made = folders | {("qwen3_moe", "4:g32"): experts}
    jobs = [
        {"folder": str(folder), "prompts": [[1, 2, 3]], "options": {"dtype": "bfloat16"}} for folder in made.values()
    ]
    return dict(zip(made, engine(jobs)[0], strict=True))


@pytest.mark.parametrize("scheme", ANSWERS)
@pytest.mark.parametrize("source", SOURCES)
def test_vllm_on_a_processor_opens_floats_and_names_what_it_lacks(answers, source, scheme):
    """An answer in place of this error would be a kernel that docs/serving.md does not know of."""
    assert ANSWERS[scheme] in answers[source, scheme]
    record("plugin", source, scheme, None, None, refused=ANSWERS[scheme])


def test_vllm_on_a_processor_opens_packed_experts_and_has_no_kernel_for_them(answers):
    assert "No WNA16 MoE backend supports the deployment configuration" in answers["qwen3_moe", "4:g32"]

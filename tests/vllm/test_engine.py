"""What vLLM does with requests, caches, ranks and adapters, it does with the plugin's models as well."""

import json
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file, save_file

import diffquant
from tests.support import tiny_lm
from tests.vllm.answers import check, check_low_bits, expected, truncated_cache
from tests.vllm.checkpoints import KINDS, write_served
from tests.vllm.conftest import needs_avx512

CHUNKED = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True, "enable_prefix_caching": True}
ALPHA, RANK = 16, 8
ADAPTED = ["diffllama", "unilm-v2"]
FAMILY_ON_RANKS = ["diffllama", "unilm-v1", "unilm-v2", "motif", "motif-grouped", "gated"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Random checkpoints as others than diffquant write them."""
    root = tmp_path_factory.mktemp("made")
    folders = {source: write_served(root / source, source) for source in FAMILY_ON_RANKS}
    folders["one KV head"] = write_served(root / "one", "unilm-v2", num_key_value_heads=1)
    return folders


@pytest.fixture(scope="module")
def adapters(made):
    """LoRA adapters of every projection, each with the checkpoint that has its products in the weights, by source."""
    return {source: write_adapter(made[source]) for source in ADAPTED}


def write_adapter(checkpoint):
    folder, merged = (checkpoint.with_name(f"{kind} {checkpoint.name}") for kind in ("adapter", "merged"))
    folder.mkdir()
    merged.mkdir()
    tensors, adapter = load_file(checkpoint / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if "_proj.weight" in name]:
        out, width = tensors[name].shape
        down, up = (torch.randn(shape, generator=generator) * 0.1 for shape in ((RANK, width), (out, RANK)))
        module = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        tensors[name] = tensors[name] + ALPHA / RANK * up @ down
    save_file(adapter, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in adapter})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    (merged / "config.json").write_text((checkpoint / "config.json").read_text())
    return folder, merged


@pytest.fixture(scope="module")
def long():
    """Prompts that begin alike and end in blocks of their own."""
    start = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(4)).tolist()
    return [start + [number] * (3 + 7 * number) for number in range(3)]


@pytest.fixture(scope="module")
def answers(engine, made, adapters, long, trained, prose):
    """What the engine answers to every job, by the job's name."""
    jobs = {
        **{
            f"chunked {source}": {"prompts": long, "options": CHUNKED, "rounds": 2, "reads_prompts": False}
            for source in ("diffllama", "unilm-v2")
        },
        **{f"bfloat16 {kind}": {"prompts": [prose], "options": {"dtype": "bfloat16"}} for kind in KINDS},
        **{f"fp8 {kind}": {"prompts": [prose], "options": {"kv_cache_dtype": "fp8"}} for kind in KINDS},
        **{
            f"adapter {source}": {
                "prompts": long,
                "adapter": str(adapters[source][0]),
                # vLLM on a processor has no log-probabilities of a prompt under an adapter.
                "reads_prompts": False,
                "options": {"enable_lora": True, "max_lora_rank": RANK},
            }
            for source in ADAPTED
        },
    }
    for name, job in jobs.items():
        job["folder"] = str((made | trained)[name.split()[1]])
    return dict(zip(jobs, engine(list(jobs.values()))[0], strict=True))


@pytest.mark.parametrize("source", ["diffllama", "unilm-v2"])
def test_chunks_and_shared_beginnings_change_nothing(answers, made, long, source):
    check("chunked", source, "16", answers[f"chunked {source}"], expected(made[source], long))
    assert [answer["cached"] for answer in answers[f"chunked {source}"][1]] == [64, 64, 64]


@pytest.mark.parametrize("kind", KINDS)
def test_four_bits_lose_no_more_than_in_our_own_bfloat16(answers, trained, prose, kind):
    """Through vLLM's own kernel for 4 bits where it takes a layer's sizes."""
    check_low_bits(trained[kind], answers[f"bfloat16 {kind}"], prose)


@needs_avx512
@pytest.mark.parametrize("kind", KINDS)
def test_vllms_fp8_cache_is_close(answers, trained, prose, kind):
    """A float of 8 bits has 3 for the fraction: keys and values are off by up to a sixteenth."""
    exact, found = expected(trained[kind], [prose])[0]["prompt"], answers[f"fp8 {kind}"][0][0]["prompt"]
    assert 1e-4 < mean(abs(a - b) for a, b in zip(found, exact, strict=True)) < 0.1


STATIC = ["diffllama", "unilm-v2"]
ALONE = {"trust_remote_code": True, "model_impl": "transformers"}


@pytest.fixture(scope="module")
def static(engine, tmp_path_factory, long):
    """Folders with calibrated scales of the cache, and what the engine answers with them, by the plugin and alone."""
    root, folders = tmp_path_factory.mktemp("static"), {}
    for source in STATIC:
        checkpoint = write_served(root / source, source, vocab_size=tiny_lm.WORDS)
        tiny_lm.tokenizer().save_pretrained(checkpoint)
        for bits in ("4:g32", "16"):
            folders[source, bits] = root / f"{source}-{bits[:2]}"
            diffquant.quantize(checkpoint, folders[source, bits], {"weights": bits, "kv": "e4m3:static"})
    jobs = [{"folder": str(folder), "prompts": long} for folder in folders.values()]
    plugin = dict(zip(folders, engine(jobs)[0], strict=True))
    ranks = engine([jobs[0] | {"options": TWO}])[0][0]
    plain = [job | {"options": ALONE} for key, job in zip(folders, jobs, strict=True) if key[1] == "16"]
    alone = dict(zip(STATIC, engine(plain, VLLM_PLUGINS="none")[0], strict=True))
    return folders, plugin, ranks, alone


@needs_avx512
def test_a_cache_with_calibrated_scales_has_diffquants_levels(static, long):
    """Truncated to them, as vLLM does on a processor: rounded to the nearest, log-probabilities differ by 0.2 to 0.7.

    A key or value on a level may be cut to the one below by the last bit of its sum, which is a sixteenth of it.
    """
    folders, plugin, ranks, alone = static
    with truncated_cache():
        wanted = {key: expected(folder, long, kv="e4m3:static") for key, folder in folders.items()}
    for (source, bits), answer in wanted.items():
        check("plugin", source, bits, plugin[source, bits], answer, 0.02, cache="e4m3:static")
    for source in STATIC:
        check("folder", source, "16", alone[source], wanted[source, "16"], 0.02, cache="e4m3:static")
    check("two ranks", "diffllama", "4:g32", ranks, wanted["diffllama", "4:g32"], 0.02, cache="e4m3:static")


@pytest.mark.parametrize("source", ADAPTED)
def test_an_adapter_gives_what_its_products_give_in_the_weights(answers, adapters, long, source):
    check("adapter", source, "16", answers[f"adapter {source}"], expected(adapters[source][1], long))


# "one KV head" stands on both ranks. Packed rows of DIFF models with all signal heads first move, too.
ON_RANKS = [
    *((source, "16") for source in (*FAMILY_ON_RANKS, "one KV head")),
    ("diffllama", "4"),
    ("motif-grouped", "8"),
]
TWO = {"tensor_parallel_size": 2}
PIPED = ["diffllama", "unilm-v2"]
# Those whose modelling file has a plan for ranks.
ALONE_ON_RANKS = ["unilm-v1", "unilm-v2", "gated"]


@pytest.fixture(scope="module")
def packed(made):
    """The checkpoints that are shared by ranks, by source and width."""
    folders = {(source, "16"): made[source] for source, bits in ON_RANKS if bits == "16"}
    for source, bits in ON_RANKS:
        if bits != "16":
            folders[source, bits] = made[source].parent / f"{source}-{bits}"
            diffquant.quantize(made[source], folders[source, bits], {"weights": f"{bits}:g32"})
    return folders


@pytest.fixture(scope="module")
def on_ranks(engine, packed, made, adapters, long):
    """What two processes answer, by source and width."""
    jobs = {key: {"folder": str(folder), "options": TWO} for key, folder in packed.items()}
    lora = TWO | {"enable_lora": True, "max_lora_rank": RANK}
    for source in ADAPTED:
        adapted = {"adapter": str(adapters[source][0]), "reads_prompts": False, "options": lora}
        jobs[f"adapter {source}"] = adapted | {"folder": str(made[source])}
    return dict(zip(jobs, engine([job | {"prompts": long} for job in jobs.values()])[0], strict=True))


@pytest.mark.parametrize(("source", "bits"), ON_RANKS)
def test_two_ranks_compute_what_one_computes(on_ranks, packed, long, source, bits):
    check("two ranks", source, bits, on_ranks[source, bits], expected(packed[source, bits], long))


@pytest.fixture(scope="module")
def alone_on_ranks(engine, made, long):
    """What two processes answer by the folders alone, by source."""
    options = TWO | {"trust_remote_code": True, "model_impl": "transformers"}
    jobs = []
    for source in ALONE_ON_RANKS:
        folder = made[source].parent / f"{source} with code"
        diffquant.quantize(made[source], folder, {"kv": "8:row"})
        jobs.append({"folder": str(folder), "prompts": long, "options": options})
    return dict(zip(ALONE_ON_RANKS, engine(jobs, VLLM_PLUGINS="none")[0], strict=True))


@pytest.mark.parametrize("source", ALONE_ON_RANKS)
def test_two_ranks_of_the_folder_alone_compute_what_one_computes(alone_on_ranks, made, long, source):
    check("folder on two ranks", source, "16", alone_on_ranks[source], expected(made[source], long))


@pytest.fixture(scope="module")
def piped(engine, made, long):
    """What two processes that vLLM starts answer, each with half of the layers, by source."""
    # vLLM on a processor makes room for what the first half sends as it warms a model up that may be compiled, which it
    # does not do where all is eager; in this mode it compiles nothing.
    options = {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 1}}
    jobs = [{"folder": str(made[source]), "prompts": long, "options": options} for source in PIPED]
    return dict(zip(PIPED, engine(jobs, VLLM_ENABLE_V1_MULTIPROCESSING="1")[0], strict=True))


@pytest.mark.parametrize("source", PIPED)
def test_layers_in_two_processes_compute_what_one_computes(piped, made, long, source):
    check("pipeline", source, "16", piped[source], expected(made[source], long))


def test_an_adapter_is_shared_by_ranks(on_ranks, adapters, long):
    wanted = expected(adapters["unilm-v2"][1], long)
    check("adapter on two ranks", "unilm-v2", "16", on_ranks["adapter unilm-v2"], wanted)


def test_an_adapter_whose_rows_would_move_is_refused_on_two_ranks(on_ranks):
    said = "diffllama has all signal heads first, so LoRA adapters to it need a single rank"
    assert said in on_ranks["adapter diffllama"]

"""`diffquant serve`, asked over HTTP by the clients that people use, answers as diffquant does."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

import diffquant
from diffquant.data import books_text, pocket_models, smollm2_file
from diffquant.errors import UsageError
from diffquant.measure.protocols.hellaswag import load_items
from diffquant.serving.plan import plan_server

openai = pytest.importorskip("openai", reason="needs OpenAI's client, which is what make test-all ONLY=serving fetches")

psutil = pytest.importorskip("psutil", reason="needs psutil, which is what make test-all ONLY=serving fetches")

from tests.serving.test_plan import ASKED  # noqa: E402
from tests.support import tiny_lm  # noqa: E402
from tests.vllm.answers import truncated_cache  # noqa: E402
from tests.vllm.checkpoints import OWN, write_served  # noqa: E402
from tests.vllm.conftest import needs_avx512  # noqa: E402
from tests.vllm.hellaswag import ITEMS, compare  # noqa: E402
from tests.vllm.server import NEW, ROOT, free_port, served, write_pocket  # noqa: E402

REQUESTS = 32


@pytest.fixture(scope="module")
def v2(tmp_path_factory):
    """DIFF V2 at 4 bits in float32, where batches change no token."""
    folder = write_pocket(tmp_path_factory.mktemp("v2") / "prose-v2", "diff-v2", {"weights": "4:row", "kv": "8:row"})
    with served(folder, folder.with_suffix(".log"), "--dtype", "float32", "--cache", "auto") as server:
        yield server


@pytest.fixture(scope="module")
def model(v2):
    return diffquant.load(v2.folder, {"kv": 16}, dtype="float32"), diffquant.load_tokenizer(v2.folder)


@pytest.fixture(scope="module")
def prompts():
    """Beginnings of sentences, of many lengths."""
    text = books_text()
    return [text[start * 997 :][: 20 + 13 * start] for start in range(1, REQUESTS + 1)]


def test_the_command_line_that_is_printed_asks_the_server(v2):
    answer = json.loads(subprocess.run(v2.lines[1], shell=True, capture_output=True, check=True).stdout)
    assert answer["choices"][0]["text"]
    assert v2.lines[0].startswith("http://127.0.0.1:")


def test_requests_at_once_give_what_each_gives_alone(v2, model, prompts):
    loaded, tokenizer = model
    with ThreadPoolExecutor(REQUESTS) as threads:
        together = list(threads.map(v2.complete, prompts))
    alone = [diffquant.generate(loaded, prompt, tokenizer=tokenizer, max_new_tokens=NEW) for prompt in prompts]
    assert together == alone


def test_a_request_that_is_given_up_leaves_the_others(v2, model, prompts):
    loaded, tokenizer = model
    stream = v2.client.completions.create(
        model=v2.folder.name, prompt=prompts[0], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    assert [next(stream).choices[0].text for _ in range(3)]
    assert v2.running() == 1
    stream.close()
    for _ in range(100):
        if v2.running() == 0:
            break
        time.sleep(0.1)
    assert v2.running() == 0
    expected = diffquant.generate(loaded, prompts[1], tokenizer=tokenizer, max_new_tokens=NEW)
    assert v2.complete(prompts[1]) == expected


def test_a_prompt_that_is_longer_than_the_context_is_refused(v2, prompts):
    with pytest.raises(openai.BadRequestError, match="512"):
        v2.complete(books_text()[:8000])
    assert v2.complete(prompts[0])


def test_an_answer_ends_where_the_context_does(v2, model, prompts):
    loaded, tokenizer = model
    with pytest.raises(openai.BadRequestError, match="max_tokens=600"):
        v2.complete(prompts[0], max_tokens=600)
    asked = {"max_tokens": 500, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = v2.client.completions.create(model=v2.folder.name, prompt=books_text()[:1300], **asked)
    assert answer.usage.total_tokens == loaded.config.max_position_embeddings == 512
    assert answer.choices[0].finish_reason == "length"
    kept = diffquant.generate(loaded, books_text()[:1300], tokenizer=tokenizer, max_new_tokens=NEW)
    assert answer.choices[0].text.startswith(kept)
    assert v2.complete(prompts[0])


def test_a_chat_with_a_model_that_has_no_template_is_refused(v2, prompts):
    with pytest.raises(openai.BadRequestError, match="chat template"):
        v2.client.chat.completions.create(model=v2.folder.name, messages=[{"role": "user", "content": "Who are you?"}])
    assert v2.complete(prompts[0])


@pytest.mark.parametrize("begun", ["api_server", "EngineCore"])
def test_a_server_that_is_stopped_while_it_starts_leaves_no_process(v2, tmp_path, begun):
    """Once its process runs, and once that of the engine does."""
    options = ["--port", str(free_port()), "--dtype", "float32", "--cache", "auto"]
    command = [sys.executable, "-m", "diffquant", "serve", str(v2.folder), *options]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as server:
        for _ in range(1200):
            started = psutil.Process(server.pid).children(recursive=True)
            if any(begun in " ".join([process.name(), *process.cmdline()]) for process in started):
                break
            time.sleep(0.1)
        assert started
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 130
    assert not psutil.wait_procs(started, 5)[1]


def test_the_recipes_cache_is_said_once_to_be_left_out(v2):
    log = v2.log.read_text()
    assert log.count("of the recipe are not applied") == 1
    assert "k 8:row, v 8:row of the recipe are not applied: K and V are stored as float32" in log


def test_a_cache_that_vllm_lacks_is_refused_with_the_nearest_that_it_has(tmp_path):
    folder = write_pocket(tmp_path / "v2", "diff-v2", {"kv": "4:row"})
    with pytest.raises(UsageError, match=r"does not have this recipe's cache.*cache='fp8', .*cache='auto'"):
        plan_server(folder, **ASKED)
    with pytest.raises(UsageError, match=r"has no cache 'int8_per_token_head' on a CPU; .*fp8_e4m3"):
        plan_server(folder, **ASKED | {"cache": "int8_per_token_head"})


@needs_avx512
def test_a_calibrated_cache_is_served_as_diffquant_computes_it(tmp_path, prompts):
    """And without the folder's own cache where that is asked for."""
    folder = write_pocket(tmp_path / "v1", "diff-v1", {"weights": "4:row", "kv": "e4m3:static"})
    tokenizer = diffquant.load_tokenizer(folder)
    for options, recipe in ((), None), (("--cache", "auto"), {"kv": 16}):
        loaded = diffquant.load(folder, recipe, dtype="float32")
        with served(folder, tmp_path / "log", "--dtype", "float32", *options) as server:
            for prompt in prompts[:4]:
                with truncated_cache():
                    expected = diffquant.generate(loaded, prompt, tokenizer=tokenizer, max_new_tokens=NEW)
                assert server.complete(prompt) == expected
        assert "are not applied" not in server.log.read_text()


@pytest.mark.parametrize("source", OWN)
def test_diffquants_own_decoders_are_served(tmp_path, prompts, source):
    folder = write_served(tmp_path / source, source, vocab_size=tiny_lm.WORDS)
    tiny_lm.tokenizer().save_pretrained(folder)
    loaded, tokenizer = diffquant.load(folder, dtype="float32"), diffquant.load_tokenizer(folder)
    with served(folder, tmp_path / "log", "--dtype", "float32") as server:
        for prompt in prompts[:4]:
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            wanted = loaded.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
            # A random model's bytes are no text.
            asked = {"max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
            answer = server.client.completions.create(model=source, prompt=prompt, **asked).choices[0]
            assert answer.token_ids == wanted[0, ids.shape[1] :].tolist()


def test_fidelity_to_a_server_is_that_to_its_folder(v2, tmp_path):
    """Of the likeliest tokens alone, over whole chunks of the served context but for the token that is generated."""
    pocket = next(path for path in pocket_models("prose") if path.name.endswith("v2"))
    diffquant.quantize(pocket, tmp_path / "low", {"weights": "4:row"})
    reading = {"characters": 6000, "dtype": "float32"}
    served = diffquant.fidelity(pocket, v2.lines[0], **reading)
    folder = diffquant.fidelity(pocket, tmp_path / "low", context=511, **reading)
    assert (served.k, served.text["context"]) == (20, 511)
    assert served.agreement.mean == folder.agreement.mean
    assert served.perplexities == pytest.approx(folder.perplexities, rel=1e-5)
    assert 0.2 * folder.mean.mean < served.mean.mean < folder.mean.mean
    same = diffquant.fidelity(tmp_path / "low", v2.lines[0], **reading)
    assert same.mean.mean < 1e-7 < folder.mean.mean
    assert same.agreement.mean == 1


def test_lm_eval_over_http_gives_our_own_hellaswag(v2, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "items").mkdir()
    found = compare(v2, load_items(limit=ITEMS), tmp_path / "items")
    # A sum over some dozen tokens, each of which vLLM rounds to a float.
    assert found.furthest < 1e-3
    assert found.lm_eval_acc == pytest.approx(found.our_acc)
    assert found.lm_eval_acc_norm == pytest.approx(found.our_acc_norm)


def test_a_folder_is_served_by_the_file_that_it_carries(tmp_path, prompts):
    """DIFF V1 by its modelling file on two ranks, as a machine without diffquant serves it."""
    folder = write_pocket(tmp_path / "v1", "diff-v1", {"kv": "8:row"})
    options = ["--dtype", "float32", "--implementation", "folder", "--tensor-parallel", "2", "--cache", "auto"]
    with served(folder, tmp_path / "log", *options) as server:
        loaded, tokenizer = diffquant.load(folder, {"kv": 16}, dtype="float32"), diffquant.load_tokenizer(folder)
        for prompt in prompts[:4]:
            expected = diffquant.generate(loaded, prompt, tokenizer=tokenizer, max_new_tokens=NEW)
            assert server.complete(prompt) == expected
        assert "TransformersForCausalLM" in server.log.read_text()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2 as DIFF V2 at 4 bits, with maps that differ and gates that depend on the token."""
    root = tmp_path_factory.mktemp("smollm2")
    diffquant.convert(smollm2_file(), root / "plain", "diff-v2")
    file, generator = root / "plain/model.safetensors", torch.Generator().manual_seed(6)
    tensors = load_file(file)
    for name, weight in tensors.items():
        # Each pair has its signal rows before its noise rows.
        if name.endswith("q_proj.weight"):
            pairs = weight.float().unflatten(0, (-1, 2, 64))
            pairs[:, 1] += 0.5 * pairs.std() * torch.randn(pairs[:, 1].shape, generator=generator)
            tensors[name] = pairs.flatten(0, 2).to(weight.dtype)
        elif name.endswith("lambda_proj.weight"):
            tensors[name] = (0.05 * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    diffquant.quantize(root / "plain", root / "SmolLM2-diff-v2", {"weights": "4:g32"})
    return root / "SmolLM2-diff-v2"


def test_smollm2_at_4_bits_says_over_http_what_diffquant_says(smollm2, tmp_path):
    with served(smollm2, tmp_path / "log", "--dtype", "float32", "--context", "512") as server:
        loaded, tokenizer = diffquant.load(smollm2, dtype="float32"), diffquant.load_tokenizer(smollm2)
        for prompt in ("The capital of France is", "Once upon a time there was a small girl who"):
            expected = diffquant.generate(loaded, prompt, tokenizer=tokenizer, max_new_tokens=NEW)
            assert server.complete(prompt) == expected

"""`diffquant serve`, asked over HTTP by the clients that people use, answers as diffquant does."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

import diffquant
from diffquant.data import books_text, pocket_models
from diffquant.evals.protocols import hellaswag
from diffquant.evals.torch_model import TorchModel

openai = pytest.importorskip("openai", reason="needs OpenAI's client, which is what make test-serving fetches")

ROOT = Path(__file__).parents[2]
NEW = 12
REQUESTS = 32
ITEMS = 24
TASK = """
task: items
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: endings
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@dataclass
class Served:
    """A server that answers.

    Attributes:
        folder: folder that it serves.
        lines: lines that the command printed, the URL and the command line of curl.
        log: file that stderr goes to.
        client: OpenAI's client of it.
    """

    folder: Path
    lines: list[str]
    log: Path
    client: openai.OpenAI

    def complete(self, prompt: str, **asked: object) -> str:
        asked = {"max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}} | asked
        return self.client.completions.create(model=self.folder.name, prompt=prompt, **asked).choices[0].text

    def running(self) -> float:
        """Number of requests that the engine works on."""
        metrics = urlopen(self.lines[0].replace("/v1", "/metrics")).read().decode()
        return sum(float(number) for number in re.findall(r"^vllm:num_requests_running\S* (\S+)$", metrics, re.M))


@contextmanager
def served(folder: Path, log: Path, *options: str) -> Iterator[Served]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "diffquant", "serve", str(folder), "--port", str(port), *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
    ):
        try:
            lines = [server.stdout.readline().strip() for _ in range(2)]
            assert all(lines), log.read_text()[-4000:]
            yield Served(folder, lines, log, openai.OpenAI(base_url=lines[0], api_key="none", max_retries=0))
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 130


@pytest.fixture(scope="module")
def v2(tmp_path_factory):
    """DIFF V2 at 4 bits in float32, where batches change no token."""
    folder = tmp_path_factory.mktemp("v2") / "prose-v2"
    pocket = next(path for path in pocket_models("prose") if path.name.endswith("v2"))
    diffquant.quantize(pocket, folder, {"weights": "4:row", "kv": "8:row"})
    with served(folder, folder.with_suffix(".log"), "--dtype", "float32") as server:
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


def test_the_recipes_cache_is_said_to_be_left_out(v2):
    note = "note: k 8:row, v 8:row of the recipe are not done by vLLM: K and V are stored with 16 bits"
    assert note in v2.log.read_text()


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


def test_lm_eval_over_http_gives_our_own_hellaswag(v2, model, tmp_path, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    items = hellaswag.load_items(limit=ITEMS)
    entries = [{"query": item.query, "endings": list(item.endings), "label": item.label} for item in items]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, entries)))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "items.jsonl"))
    output = simple_evaluate(
        model="local-completions",
        model_args={
            "model": v2.folder.name,
            "base_url": f"{v2.lines[0]}/completions",
            "tokenizer": str(v2.folder),
            "num_concurrent": 8,
            # As the tokenizer begins texts by itself, and `diffquant eval` with it.
            "add_bos_token": True,
            "max_length": 512,
        },
        tasks=["items"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(output["samples"]["items"], key=lambda sample: sample["doc_id"])
    answers = [[float(logprob) for ((logprob, _),) in sample["resps"]] for sample in samples]
    ours = hellaswag.evaluate_hellaswag(TorchModel(model[0]), model[1], items)
    differences = [
        abs(a - b) for theirs, own in zip(answers, ours.logprobs, strict=True) for a, b in zip(theirs, own, strict=True)
    ]
    # A sum over some dozen tokens, each of which vLLM rounds to a float.
    assert max(differences) < 1e-3
    assert output["results"]["items"]["acc,none"] == pytest.approx(sum(ours.correct) / ITEMS)
    assert output["results"]["items"]["acc_norm,none"] == pytest.approx(sum(ours.correct_norm) / ITEMS)


def test_a_folder_is_served_by_the_file_that_it_carries(tmp_path, prompts):
    """DIFF V1 by its modelling file, as a machine without diffquant serves it."""
    pocket = next(path for path in pocket_models("prose") if path.name.endswith("diff-v1"))
    folder = tmp_path / "v1"
    diffquant.quantize(pocket, folder, {"kv": "8:row"})
    with served(folder, tmp_path / "log", "--dtype", "float32", "--implementation", "folder") as server:
        loaded, tokenizer = diffquant.load(folder, {"kv": 16}, dtype="float32"), diffquant.load_tokenizer(folder)
        for prompt in prompts[:4]:
            expected = diffquant.generate(loaded, prompt, tokenizer=tokenizer, max_new_tokens=NEW)
            assert server.complete(prompt) == expected
        assert "TransformersForCausalLM" in server.log.read_text()

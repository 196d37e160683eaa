"""KL of two models over a text, held to scipy, to torch on whole passes, and to what llama.cpp wrote and printed."""

import json
import logging
import math
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import scipy.stats
import torch
from torch.nn.functional import kl_div

import diffquant
from diffquant import data
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.texts import text_digest
from diffquant.errors import CheckpointError, DiffQuantError, OutputExistsError, UsageError
from diffquant.measure.fidelity import compare_distributions
from diffquant.measure.fidelity.base_file import BaseFile, write_base
from diffquant.measure.fidelity.models import Distributions, divergence
from diffquant.measure.fidelity.result import Fidelity
from diffquant.measure.fidelity.served import ServedModel
from diffquant.quantization import smoothing
from diffquant.support.progress import report_nothing
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json
from tests.support.tables import in_one_test

CONTEXT = 64
MODELS = {path.name: path for path in data.pocket_models("prose")}
READING = {"context": CONTEXT, "characters": 4000, "dtype": "float32"}


@pytest.fixture(scope="module")
def reference():
    return MODELS["prose-diff-v2"]


@pytest.fixture(scope="module")
def candidate(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("candidate") / "low"
    diffquant.quantize(reference, folder, {"weights": "4:row"})
    return folder


@pytest.fixture(scope="module")
def result(reference, candidate):
    return diffquant.fidelity(reference, candidate, **READING)


def random_logs(rows=50, vocabulary=30, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)).double().mul(3).log_softmax(-1)


def likeliest(logs, k):
    top = logs.topk(k, -1)
    return Distributions(top.values, top.indices, k)


def binned(p, q, keep):
    """scipy's KL of two distributions with all tokens but `keep` in one bin."""
    kept = [[float(d[i].exp()) for i in keep] for d in (p, q)]
    return scipy.stats.entropy(*([*values, 1 - sum(values)] for values in kept))


def test_whole_distributions_have_scipys_divergence():
    p, q = random_logs(), random_logs(seed=1)
    expected = [scipy.stats.entropy(a.exp(), b.exp()) for a, b in zip(p, q, strict=True)]
    assert divergence(Distributions(p), Distributions(q)).tolist() == pytest.approx(expected, rel=1e-4)


@in_one_test("known", ["reference", "candidate", "both"])
def test_what_only_the_likeliest_tokens_tell_is_a_lower_bound(known):
    p, q = random_logs(), random_logs(seed=1)
    whole, found = divergence(Distributions(p), Distributions(q)), {}
    for k in (1, 5, 20):
        sides = (
            likeliest(p, k) if known != "candidate" else Distributions(p),
            likeliest(q, k) if known != "reference" else Distributions(q),
        )
        found[k] = divergence(*sides)
        for row in range(len(p)):
            keep = {
                name: set(side[row].topk(k).indices.tolist()) for name, side in (("reference", p), ("candidate", q))
            }
            kept = keep["reference"] & keep["candidate"] if known == "both" else keep[known]
            assert float(found[k][row]) == pytest.approx(binned(p[row], q[row], kept), rel=1e-4, abs=1e-7)
        assert (found[k] <= whole + 1e-9).all()
    assert divergence(likeliest(p, 30), likeliest(q, 30)).tolist() == pytest.approx(whole.tolist(), rel=1e-6)


def test_figures_are_those_of_torch_over_whole_passes(reference, candidate, result):
    """Each chunk in one pass of both models: the second half is scored, and each position counts once."""
    tokenizer = diffquant.load_tokenizer(reference)
    models = [diffquant.load(path, dtype="float32") for path in (reference, candidate)]
    text = data.books_text()[-4000:]
    begins = tokenizer.bos_token_id if tokenizer.encode("a")[0] == tokenizer.bos_token_id else None
    ids = [*([] if begins is None else [begins]), *tokenizer.encode(text, add_special_tokens=False)]
    kls, same, nll = [], [], []
    for start in range(0, len(ids) - CONTEXT + 1, CONTEXT):
        chunk = torch.tensor(ids[start : start + CONTEXT])
        seen = chunk.clone()
        if begins is not None:
            seen[0] = begins
        with torch.inference_mode():
            p, q = (model(seen[None]).logits[0, CONTEXT // 2 : -1].log_softmax(-1) for model in models)
        kls.append(kl_div(q, p, reduction="none", log_target=True).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        nll.append(-q.gather(1, chunk[CONTEXT // 2 + 1 :, None]))
    kl = torch.cat(kls)
    assert result.text["scored"] == len(kl) == len(kls) * (CONTEXT // 2 - 1)
    assert result.mean.mean == pytest.approx(float(kl.mean()), rel=1e-4)
    assert result.quantiles["99 %"].mean == pytest.approx(float(kl.quantile(0.99)), rel=1e-4)
    assert result.largest == pytest.approx(float(kl.max()), rel=1e-4)
    assert result.agreement.mean == pytest.approx(float(torch.cat(same).double().mean()))
    assert result.perplexities[1] == pytest.approx(math.exp(float(torch.cat(nll).mean())), rel=1e-4)
    assert result.mean.low < result.mean.mean < result.mean.high
    assert result.k is None


def test_a_quantized_reference_and_a_candidate_of_16_bits_may_be_exchanged(reference, candidate, caplog):
    caplog.set_level(logging.INFO, "diffquant.verbs")
    diffquant.fidelity(reference, candidate, **READING)
    assert "swap" not in caplog.text
    diffquant.fidelity(candidate, reference, **READING)
    assert "the candidate has not; did you swap the two models?" in caplog.text


def test_exports_of_a_quantized_model_are_not_called_unquantized_or_uncalibrated(tmp_path, caplog):
    caplog.set_level(logging.INFO, "diffquant.verbs")
    llama, rounding = tiny_lm.write_llama(tmp_path / "llama"), {"name": "gptq", "tokens": 512, "window": 64}
    recipe = {"weights": "4:g32", "overrides": {"*.down_proj": "16"}}
    diffquant.quantize(llama, tmp_path / "low", recipe, rounding=rounding)
    diffquant.export(tmp_path / "low", tmp_path / "low.gguf", to="gguf")
    of_gguf = diffquant.fidelity(tmp_path / "low", tmp_path / "low.gguf", **READING)
    assert of_gguf.text["calibration"].endswith("weights were rounded to Q4_0 before; on which text is not recorded")
    diffquant.quantize(data.pocket_models("needle")[0], tmp_path / "needle", {"weights": "4:g32"})
    diffquant.export(tmp_path / "needle", tmp_path / "onnx")
    diffquant.fidelity(tmp_path / "needle", tmp_path / "onnx", **READING)
    assert "swap" not in caplog.text


def test_intervals_are_over_parts_of_the_text_and_not_over_positions():
    """Positions of a chunk that are all alike tell no more than one of them."""
    levels = torch.linspace(0, 1, 32, dtype=torch.float64)[:, None]
    narrow, wide = (
        Fidelity.from_compared((kl, kl > 0, torch.stack([kl, kl]), None), {"name": "a"}, {"name": "b"}, {}, {})
        for kl in (levels.expand(32, 1), levels.expand(32, 500))
    )
    assert (narrow.mean.low, narrow.mean.high) == pytest.approx((wide.mean.low, wide.mean.high))
    means = levels.view(16, 2).mean(1)
    half = scipy.stats.t.ppf(0.975, 15) * float(means.std()) / 4
    assert wide.mean.high - wide.mean.mean == pytest.approx(half)
    assert wide.quantiles["median"].low < 0.5 < wide.quantiles["median"].high
    assert 0.9 < wide.agreement.low < wide.agreement.mean < wide.agreement.high == 1


def test_a_perplexity_beyond_all_numbers_is_none_in_json():
    kl = torch.ones(2, 3, dtype=torch.float64)
    broken = Fidelity.from_compared(
        (kl, kl > 0, torch.stack([kl, 1000 * kl]), None), {"name": "a"}, {"name": "b"}, {}, {}
    )
    assert broken.perplexities == (pytest.approx(math.e), math.inf)
    assert json.loads(broken.to_json())["perplexity"]["candidate"] is None


def test_an_export_is_compared_with_its_checkpoint(reference, tmp_path):
    pytest.importorskip("onnxruntime")
    diffquant.export(reference, tmp_path / "onnx")
    exact = diffquant.fidelity(reference, tmp_path / "onnx", **READING)
    assert exact.candidate["kind"] == "export"
    assert exact.largest < 1e-5
    assert exact.agreement.mean == 1.0


def test_a_saved_base_stands_for_its_model(reference, candidate, result, tmp_path):
    base = tmp_path / "base.kld"
    assert diffquant.fidelity(reference, save_base=base, **READING) is None
    stored = diffquant.fidelity(base, candidate, dtype="float32")
    assert stored.text["scored"] == result.text["scored"]
    assert stored.mean.mean == pytest.approx(result.mean.mean, rel=1e-3)
    assert stored.perplexities[0] == pytest.approx(result.perplexities[0], rel=1e-4)
    assert list(tmp_path.iterdir()) == [base]
    for option, value in (("text", base), ("context", CONTEXT), ("characters", 4000)):
        with pytest.raises(UsageError, match="leave out text, characters and context"):
            diffquant.fidelity(base, candidate, dtype="float32", **{option: value})


def test_the_command_line_saves_a_base_without_a_candidate(reference, candidate, tmp_path, run):
    read, base = ("--characters", 4000, "--context", CONTEXT), tmp_path / "base.kld"
    code, out, err = run("fidelity", reference, "--save-base", base, *read)
    assert (code, out) == (0, f"wrote {base}\n"), err
    code, out, _ = run("fidelity", base, candidate, "--json")
    assert (code, json.loads(out)["reference"]["kind"]) == (0, "llama.cpp base file")
    code, _, err = run("fidelity", reference)
    assert (code, err) == (2, "error: give a candidate to compare, or --save-base FILE instead\n")


def test_a_base_keeps_log_probabilities_to_its_step(tmp_path):
    logs, tokens = random_logs(3, 7).float() * 4, torch.arange(16).view(2, 8)
    logs = logs.log_softmax(-1)
    write_base(tmp_path / "base", tokens, iter([Distributions(logs), Distributions(logs.flip(0))]))
    opened = BaseFile(tmp_path / "base")
    assert (opened.context, opened.vocabulary, opened.chunks) == (8, 7, 2)
    assert opened.fixed_chunks.tolist() == tokens.tolist()
    floor = torch.maximum(logs, logs.amax(-1, keepdim=True) - 16)
    assert torch.allclose(opened.predict(1, tokens[1]).logs.flip(0), floor, atol=16 / 65535)


def test_a_base_that_was_cut_short_is_refused(tmp_path):
    write_base(tmp_path / "base", torch.arange(16).view(2, 8), iter([Distributions(random_logs(3, 7).float())] * 2))
    whole = (tmp_path / "base").read_bytes()
    (tmp_path / "base").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        BaseFile(tmp_path / "base")


@pytest.fixture
def serve():
    """A server that answers as vLLM's, from a model that runs here."""
    servers = []

    def start(path, most=1000, length=None, key=None):
        model, tokenizer = diffquant.load(path, dtype="float32"), diffquant.load_tokenizer(path)

        class Handler(BaseHTTPRequestHandler):
            def answer(self, body, status=200):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def do_GET(self):
                if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                    self.answer({"error": "Unauthorized"}, 401)
                    return
                self.answer({"data": [{"id": "served", "max_model_len": length}]})

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    self.answer({"tokens": tokenizer.encode(asked["prompt"])})
                    return
                k, ids = asked["prompt_logprobs"], torch.tensor([asked["prompt"]])
                if k > most:
                    self.answer({"error": f"at most {most} logprobs"}, 400)
                    return
                with torch.inference_mode():
                    logs = model(ids).logits[0].log_softmax(-1)
                told = [None]
                for row, token in zip(logs[:-1], ids[0, 1:].tolist(), strict=True):
                    top = {*row.topk(k).indices.tolist(), token}
                    told.append({str(i): {"logprob": float(row[i])} for i in top})
                self.answer({"choices": [{"prompt_logprobs": told}]})

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_gives_a_lower_bound_with_its_k(reference, candidate, result, serve):
    bound = diffquant.fidelity(reference, serve(candidate), top_k=5, **READING)
    assert bound.k == 5
    assert 0.2 * result.mean.mean < bound.mean.mean < result.mean.mean
    assert bound.agreement.mean == result.agreement.mean
    assert bound.perplexities == pytest.approx(result.perplexities, rel=1e-5)
    assert "lower bound" in bound.summary()


def test_a_server_is_asked_once_how_it_begins_texts(reference, candidate, serve, monkeypatch):
    asked, request = [], ServedModel._request
    monkeypatch.setattr(ServedModel, "_request", lambda self, *args: asked.append(args[0]) or request(self, *args))
    found = diffquant.fidelity(reference, serve(candidate), top_k=5, **READING)
    assert asked.count("/tokenize") == 3
    assert asked.count("/v1/completions") == found.text["chunks"]


def test_tokens_that_a_vocabulary_does_not_have_are_refused():
    def side(name, told):
        return SimpleNamespace(name=name, prepended_bos_id=None, describe_model=dict, predict=lambda *_: told)

    whole, more = random_logs(3, 7).float(), random_logs(3, 9).float()
    for other in (Distributions(more), Distributions(torch.full((3, 1), -1.0), torch.full((3, 1), 8), 1)):
        sides = side("a", Distributions(whole)), side("b", other)
        with pytest.raises(UsageError, match="a has a vocabulary of 7 tokens, and b"):
            compare_distributions(*sides, torch.arange(8)[None] % 7, report_nothing)


def test_a_server_that_refuses_or_is_not_there_is_told_of(reference, candidate, serve):
    with pytest.raises(UsageError, match="is the server running"):
        diffquant.fidelity(reference, "http://127.0.0.1:9", **READING)
    with pytest.raises(DiffQuantError, match="at most 3 logprobs"):
        diffquant.fidelity(reference, serve(candidate, most=3), top_k=5, **READING)


def answers(**changes):
    """What a server says about a prompt of six tokens: its model, and two likeliest tokens of each position."""
    likeliest = {"5": {"logprob": -0.5}, "6": {"logprob": -1.0}}
    completion = {"choices": [{"prompt_logprobs": [None, *[likeliest] * 5]}]}
    return {"/v1/models": {"data": [{"id": "x"}]}, "/tokenize": {"tokens": [1, 2]}, "/v1/completions": completion} | {
        {"models": "/v1/models", "tokenize": "/tokenize", "completions": "/v1/completions"}[name]: answer
        for name, answer in changes.items()
    }


def told(*positions):
    return {"completions": {"choices": [{"prompt_logprobs": [None, *positions]}]}}


@in_one_test(
    "changes",
    [
        *({"models": answer} for answer in ({}, {"data": []}, {"data": [{}]}, {"data": [3]}, None)),
        {"models": {"data": [{"id": "x", "max_model_len": "long"}]}},
        *({"tokenize": answer} for answer in ({}, {"tokens": None}, {"tokens": ["a"]})),
        *({"completions": answer} for answer in ({}, {"choices": []}, {"choices": [None]})),
        told({"5": {"logprob": -1.0}, "6": {"logprob": -2.0}}),
        told(*[{"5": {"logprob": -1.0}}] * 5),
        told(*[{"5": {"logprob": -1.0}, "6": None}] * 5),
        *(told(*[{"5": {"logprob": -1.0}, "6": {"logprob": log}}] * 5) for log in (None, math.nan, 0.5)),
        *(told(*[{"5": {"logprob": -1.0}, name: {"logprob": -2.0}}] * 5) for name in ("six", "-6")),
    ],
)
def test_an_answer_of_another_form_is_refused_with_its_address(monkeypatch, changes):
    served = ServedModel("http://there", 2)
    monkeypatch.setattr(served, "_request", lambda path, body: answers()[path])
    served.tokens("a")
    assert served.predict(0, torch.arange(6)).logs.shape == (2, 2)
    served = ServedModel("http://there", 2)
    monkeypatch.setattr(served, "_request", lambda path, body: answers(**changes)[path])
    with pytest.raises(DiffQuantError, match=r"http://there/.* has no answer of vLLM's form"):
        served.tokens("a"), served.predict(0, torch.arange(6))


@in_one_test("address", ["http://[::1", "http://a b"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(DiffQuantError, match="http://"):
        ServedModel(address, 2).tokens("a")


def test_a_server_gets_the_key_that_serve_asks_for(reference, candidate, serve, monkeypatch):
    url = serve(candidate, key="secret")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(DiffQuantError, match="returned error 401"):
        diffquant.fidelity(reference, url, **READING)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert diffquant.fidelity(reference, url, **READING).candidate["model"] == "served"


def test_chunks_are_as_long_as_a_server_has_room_for(reference, candidate, serve):
    """It generates a token behind each."""
    url = serve(candidate, length=50)
    with pytest.raises(UsageError, match="up to 49 tokens"):
        diffquant.fidelity(reference, url, **READING | {"context": 50})
    assert diffquant.fidelity(reference, url, **READING | {"context": None}).text["context"] == 49


def test_chunks_are_no_longer_than_a_models_context(reference, candidate, tmp_path):
    short = shutil.copytree(candidate, tmp_path / "short")
    edit_json(short / "config.json", max_position_embeddings=CONTEXT - 1)
    with pytest.raises(UsageError, match="short reads chunks of up to 63 tokens, not 64"):
        diffquant.fidelity(reference, short, **READING)
    assert diffquant.fidelity(reference, short, **READING | {"context": None}).text["context"] == CONTEXT - 1
    diffquant.fidelity(reference, **READING, save_base=tmp_path / "base.kld")
    with pytest.raises(UsageError, match="short reads chunks of up to 63 tokens, not 64"):
        diffquant.fidelity(tmp_path / "base.kld", short)


def test_what_was_calibrated_on_the_scored_text_is_said(reference, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(data.books_text()[:8000])
    rounding = {"name": "gptq", "text": str(text), "tokens": 1024, "window": 128}
    diffquant.quantize(reference, tmp_path / "low", {"weights": "4:row"}, rounding=rounding)
    reading = {"context": CONTEXT, "dtype": "float32"}
    seen = diffquant.fidelity(reference, tmp_path / "low", text=text, characters=0, **reading)
    ids = diffquant.load_tokenizer(reference).encode(text.read_text(), add_special_tokens=False)
    known = int(seen.text["calibration"].split(" contains ")[1].split()[0].replace(",", ""))
    assert known == pytest.approx(1024 * 31 / CONTEXT, abs=31)
    assert len(ids) > 1500
    other = diffquant.fidelity(reference, tmp_path / "low", characters=4000, **reading)
    assert " contains 0 of " in other.text["calibration"]
    text.unlink()
    gone = diffquant.fidelity(reference, tmp_path / "low", characters=4000, **reading)
    assert "not available" in gone.text["calibration"]


def test_texts_on_which_a_conversion_scaled_the_weights_are_said(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(smoothing, "_TOKENS", 512)
    text = tmp_path / "text.txt"
    text.write_text(data.books_text()[:4000])
    diffquant.convert(reference, tmp_path / "scaled", "scaled", text=text)
    diffquant.convert(tmp_path / "scaled", tmp_path / "smoothed", "smoothed")
    for name in ("scaled", "smoothed"):
        diffquant.quantize(tmp_path / name, tmp_path / f"{name}-low", {"weights": "4:row"}, rounding="nearest")
    of_scaled, of_smoothed = (
        diffquant.fidelity(reference, tmp_path / name, **READING).text["calibration"]
        for name in ("scaled-low", "smoothed-low")
    )
    told = f"; before that, its weights were scaled on 512 tokens of a text with digest {text_digest(text.read_text())}"
    assert of_scaled == "the candidate was rounded by nearest, which needs no calibration data" + told
    assert of_smoothed.startswith(f"{of_scaled}, then smoothed on 512 tokens of a text with digest ")


def test_outputs_say_what_was_measured(reference, candidate, tmp_path):
    made = diffquant.fidelity(reference, candidate, output=tmp_path / "out", **READING)
    assert json.loads((tmp_path / "out/fidelity.json").read_text())["kl"]["mean"]["mean"] == made.mean.mean
    assert f"| mean KL, nats | {made.mean.mean:.5f} |" in (tmp_path / "out/fidelity.md").read_text()
    diffquant.fidelity(reference, candidate, output=tmp_path / "out", **READING)


def test_a_card_tells_what_was_measured_last(reference, candidate, tmp_path):
    folder = tmp_path / "candidate"
    shutil.copytree(candidate, folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n\n## Fidelity\n\nold\n\n## Use\n\nwords\n")
    before = open_source(folder).fingerprint
    for _ in range(2):
        measured = diffquant.fidelity(reference, folder, characters=3000, card=True)
    text = (folder / "README.md").read_text()
    assert text == "---\nlicense: mit\n---\n\n# Mine\n\n## Use\n\nwords\n\n" + measured.format_card_section()
    assert open_source(folder).fingerprint == before
    with pytest.raises(UsageError, match="a local folder, whose model card it changes"):
        diffquant.fidelity(reference, "http://127.0.0.1:1", card=True)


def test_what_is_written_into_a_quantized_folder_may_be_overwritten_with_it(reference, candidate, tmp_path):
    folder = tmp_path / "candidate"
    shutil.copytree(candidate, folder)
    diffquant.fidelity(reference, folder, characters=3000, card=True, output=folder)
    assert {"fidelity.json", "fidelity.md"} <= {file.name for file in folder.iterdir()}
    diffquant.quantize(reference, folder, {"weights": "4:row"}, overwrite=True)
    assert not {"fidelity.json", "fidelity.md"} & {file.name for file in folder.iterdir()}


def test_a_strangers_files_stay(reference, candidate, tmp_path):
    (tmp_path / "fidelity.md").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"fidelity\.md"):
        diffquant.fidelity(reference, candidate, output=tmp_path, **READING)
    with pytest.raises(OutputExistsError, match=r"fidelity\.md"):
        diffquant.fidelity(reference, save_base=tmp_path / "fidelity.md", **READING)
    assert (tmp_path / "fidelity.md").read_text() == "mine"


def test_models_with_other_tokens_are_not_compared(reference, tmp_path):
    other = tiny_lm.llama(seed=1)
    other.save_pretrained(tmp_path)
    tiny_lm.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="tokenize the text differently"):
        diffquant.fidelity(reference, tmp_path, **READING)


def test_a_text_that_fills_no_chunk_is_refused(reference, candidate):
    with pytest.raises(UsageError, match="fills no chunk of 64"):
        diffquant.fidelity(reference, candidate, context=CONTEXT, characters=50)

"""The page of examples/web in headless Chromium, served as any static folder is."""

import json
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tokenizers import Tokenizer

from diffquant.onnx import Generator
from diffquant.onnx.runtime.session import OnnxModel
from tests.web.browser import CHROMIUM, WEB, needs_chromium, needs_minutes, node

pytestmark = needs_chromium


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(folders, tmp_path_factory):
    """The page with the pocket model that its list names first, and none of the others."""
    root = tmp_path_factory.mktemp("site")
    for file in WEB.iterdir():
        if file.is_file():
            shutil.copy(file, root)
    (root / "node_modules").symlink_to(WEB / "node_modules")
    shutil.copytree(folders("prose-diff-v2"), root / "models/pocket")
    return root


@pytest.fixture(scope="module")
def address(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def seen(address):
    return node("run_page.mjs", {"chromium": CHROMIUM, "url": address})


def test_the_page_continues_its_prompt_as_onnx_runtime_does_in_python(seen, site):
    folder = site / "models/pocket"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(json.loads((site / "models.json").read_text())[0]["prompt"]).ids
    tokens = list(Generator(folder, model=OnnxModel(folder, threads=1, native=False)).generate_tokens(ids, 32))
    assert seen["first"]["continuation"] == tokenizer.decode(tokens)
    assert "32 tokens" in seen["first"]["status"]
    assert "tokens per second" in seen["first"]["status"]
    assert "WebAssembly" in seen["first"]["kind"]


def test_nothing_fails_and_nothing_is_fetched_from_elsewhere(seen):
    assert seen["problems"] == []
    assert seen["elsewhere"] == []
    assert not seen["first"]["error"]


def test_bits_and_layer_change_the_pictures(seen):
    assert seen["rounded"]["at4"] != seen["rounded"]["at16"]
    assert float(seen["rounded"]["change"].removesuffix(" %")) > 0
    assert all(text.startswith("sum 1.00") for text in seen["rounded"]["sums"])
    assert seen["layer"]["opened"] != seen["layer"]["first"]


def test_the_page_fits_phones_tablets_and_screens_in_light_and_dark(seen):
    assert len(seen["widths"]) == 6
    for each in seen["widths"]:
        assert each["whole"] <= each["width"], each
        assert each["map"][0] == pytest.approx(each["map"][1], abs=1), each
        assert each["map"][0] >= 200, each
    assert len({each["background"] for each in seen["widths"]}) == 2


def test_the_keyboard_reaches_every_control_and_moves_the_row(seen):
    reached = ["model", "backend", "count", "prompt", "go", "layer", "pair", "bits", "granularity", "row"]
    assert [each for each in seen["reached"] if each in reached] == reached
    assert seen["row"]["home"].startswith("token 1 of")
    assert seen["row"]["next"].startswith("token 2 of")
    assert seen["row"]["last"] != seen["row"]["home"]


def test_an_empty_prompt_is_not_continued(seen):
    assert seen["empty"] == seen["first"]["continuation"]


def test_errors_stand_in_the_page(seen):
    assert "Shorten it" in seen["long"]
    assert seen["fallback"]["note"].startswith("WebGPU cannot be used here")
    assert "WebAssembly" in seen["fallback"]["kind"]
    assert seen["fallback"]["continuation"] == seen["first"]["continuation"]
    assert "models/smollm2/web.json is missing" in seen["missing"]["error"]
    assert "diffquant export" in seen["missing"]["error"]
    assert not seen["missing"]["maps"]
    assert not seen["missing"]["go"]
    assert "ort.wasm.min.mjs cannot be loaded" in seen["unfetched"][0]
    assert "tokenizer cannot be loaded" in seen["unfetched"][1]
    assert all("npm ci" in error for error in seen["unfetched"])


@needs_minutes
def test_webgpu_continues_the_prompt_as_webassembly_does_until_it_is_stopped(address):
    """On Chromium's own software adapter, which computes on the processor what a graphics card would."""
    answer = node("run_webgpu.mjs", {"chromium": CHROMIUM, "url": address})
    assert answer["note"] == ""
    assert answer["kind"].endswith("on WebGPU")
    assert 0 < len(answer["continuation"]) < len(answer["wanted"])
    assert answer["wanted"].startswith(answer["continuation"])
    assert answer["sum"].startswith("sum 1.00")

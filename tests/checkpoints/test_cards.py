"""Front matter of model cards, as huggingface_hub reads it."""

from contextlib import nullcontext

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import diffquant
from diffquant.checkpoints.side_files import gguf_front_matter, read_front_matter
from tests.support import tiny_lm
from tests.support.checkpoints import write_llama
from tests.support.tables import in_one_test

NON_COMMERCIAL = """---
license: other
license_name: research-only
license_link: LICENSE
extra_gated_prompt: Do you accept?
base_model: org/base
tags:
- mine
---
# Ours
"""


def front_matter(folder):
    return ModelCard.load(folder / "README.md").data.to_dict()


def quantized(source, out):
    diffquant.quantize(source, out, {"weights": "8:row"}, overwrite=True)
    return front_matter(out)


def test_licence_and_base_go_along_from_verb_to_verb(tmp_path):
    llama = write_llama(tmp_path / "llama", num_hidden_layers=1)
    (llama / "README.md").write_text(NON_COMMERCIAL)
    diffquant.convert(llama, tmp_path / "diff", "diff-v2")
    terms = {"license": "other", "license_name": "research-only", "license_link": "LICENSE"}
    terms |= {"extra_gated_prompt": "Do you accept?", "base_model": "org/base"}
    converted = front_matter(tmp_path / "diff")
    assert converted == {"library_name": "transformers", **terms, "tags": ["diffquant", "differential-transformer"]}
    made = quantized(tmp_path / "diff", tmp_path / "low")
    assert {key: made[key] for key in terms} == terms
    assert made["base_model_relation"] == "quantized"
    diffquant.export(tmp_path / "low", tmp_path / "onnx")
    exported = front_matter(tmp_path / "onnx")
    assert {key: exported[key] for key in terms} == terms
    assert (exported["library_name"], exported["base_model_relation"]) == ("onnx", "quantized")


@in_one_test(
    ("link", "stays"),
    [
        ("https://example.org/LICENSE", True),
        ("HTTP://example.org", True),
        ("LICENSE.md#terms", True),
        ("docs/a:b.txt", True),
        ("javascript:alert(1)", False),
        ("JavaScript:alert(1)", False),
        ('" javascript:alert(1)"', False),
        ('"java\\tscript:alert(1)"', False),
        ('"\\x01javascript:alert(1)"', False),
        ("data:text/html,x", False),
        ("file:///etc/passwd", False),
        ("//example.org", False),
        ("'\\\\example.org'", False),
        ("https:evil", False),
        ("'http://['", False),
        ("[LICENSE]", False),
    ],
)
def test_a_licences_link_leads_to_a_web_page_or_into_the_repository(tmp_path, link, stays):
    (tmp_path / "README.md").write_text(f"---\nlicense: other\nlicense_link: {link}\n---\n")
    found = read_front_matter(tmp_path)
    assert found["license"] == "other"
    assert ("license_link" in found) == stays
    if isinstance(link, str) and not link.startswith(('"', "'", "[")):
        of_gguf = gguf_front_matter({"general.license": "other", "general.license.link": link})
        assert ("license_link" in of_gguf) == stays


def test_only_a_differential_model_has_the_tag(tmp_path):
    tag = "differential-transformer"
    llama = write_llama(tmp_path / "llama", num_hidden_layers=1)
    assert tag not in quantized(llama, tmp_path / "low")["tags"]
    diffquant.export(llama, tmp_path / "onnx")
    assert tag not in front_matter(tmp_path / "onnx")["tags"]
    assert tag in quantized(tiny_lm.write_diff_v2(tmp_path / "diff"), tmp_path / "low")["tags"]


@in_one_test("text", ["---\n[\n---\n", "---\na: &a b\nlicense: *a\n---\n", "---\n- list\n---\n"])
def test_the_licence_of_a_card_that_cannot_be_read_is_unknown(tmp_path, text):
    llama = write_llama(tmp_path / "llama", num_hidden_layers=1)
    (llama / "README.md").write_text(text)
    assert quantized(llama, tmp_path / "low")["license"] == "unknown"


def test_a_source_without_a_card_has_no_licence(tmp_path):
    made = quantized(write_llama(tmp_path / "llama", num_hidden_layers=1), tmp_path / "low")
    assert made.keys() == {"library_name", "tags"}


@in_one_test("overrides", [{}, {"*.mlp.*": "8:row"}])
def test_the_card_recommends_to_unpack_while_loading_only_where_transformers_does(tmp_path, overrides):
    """Once it decodes each weight by its own scheme this fails, and every card recommends it."""
    source = write_llama(tmp_path / "llama", num_hidden_layers=1)
    diffquant.quantize(source, tmp_path / "low", {"weights": "4:row", "overrides": overrides, "rounding": "nearest"})
    card = (tmp_path / "low/README.md").read_text()
    assert ("CompressedTensorsConfig(run_compressed=False)" in card) == (not overrides)
    with pytest.raises(RuntimeError, match="mismatch") if overrides else nullcontext():
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "low", quantization_config=CompressedTensorsConfig(run_compressed=False)
        )

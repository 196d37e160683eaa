"""Logits of a GGUF file against those of llama.cpp, whose format it is."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

import diffquant
from diffquant import Recipe
from diffquant.formats.gguf import GgufCheckpoint
from tests.llama_cpp.cases import (
    CASES,
    IS_INSTALLED,
    LLAMA3_1,
    LLAMA3_2,
    POSITIONS,
    RECORDED,
    TOKENS,
    llama_cpp_logits,
    write_case,
    write_llama,
)

ANSWERS = {case: torch.tensor(rows) for case, rows in json.loads(RECORDED.read_text())["logits"].items()}
IDS = torch.tensor([TOKENS])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama-cpp") / "llama")


def logits(path):
    return diffquant.load(path, dtype=torch.float32)(IDS).logits[0, list(POSITIONS)]


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_gguf_file_are_llama_cpps(tmp_path, llama, case):
    torch.testing.assert_close(logits(write_case(case, tmp_path, llama)), ANSWERS[case], rtol=0, atol=1e-4)


def test_the_cases_differ_by_more_than_the_tolerance():
    distinct = [
        case
        for case in CASES
        if case not in ("linear unsaid", "linear of 2023", "none", "sizes by layer", "widths of heads")
    ]
    gaps = [(ANSWERS[a] - ANSWERS[b]).abs().max() for a in distinct for b in distinct if a < b]
    assert min(gaps) > 0.05


@pytest.mark.parametrize(
    ("case", "rope"),
    {
        "linear": {"rope_type": "linear", "factor": 4.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "llama 3.1": {"rope_type": "llama3"} | LLAMA3_1,
        "llama 3.2": {"rope_type": "llama3"} | LLAMA3_2,
    }.items(),
)
def test_a_converted_folder_states_the_scaling_as_transformers_does(tmp_path, llama, case, rope):
    path = write_case(case, tmp_path, llama)
    assert GgufCheckpoint(path).config["rope_parameters"] == {"rope_theta": 10000.0} | rope
    diffquant.quantize(path, tmp_path / "out", Recipe.of(weights="8:row"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 10000.0} | rope
    oracle = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32, rope_parameters=config["rope_parameters"])
    found = oracle.eval()(IDS).logits[0, list(POSITIONS)].detach()
    torch.testing.assert_close(logits(path), found, rtol=0, atol=1e-4)


@pytest.mark.skipif(not IS_INSTALLED, reason="needs Node and what make test-llama-cpp fetches")
def test_llama_cpp_computes_what_is_recorded(tmp_path, llama):
    found = llama_cpp_logits([write_case(case, tmp_path, llama) for case in CASES])
    for case, rows in zip(CASES, found["logits"], strict=True):
        torch.testing.assert_close(torch.tensor(rows), ANSWERS[case], rtol=0, atol=1e-4, msg=case)

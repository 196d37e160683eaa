"""Logits of a GGUF file against those of llama.cpp, whose format it is."""

import json
import lzma

import pytest
import torch
from gguf import GGUFWriter
from transformers import LlamaForCausalLM

import diffquant
from diffquant import Recipe
from diffquant.checkpoints.gguf import GgufCheckpoint
from diffquant.errors import CheckpointError
from tests.llama_cpp.cases import (
    BOS,
    CASES,
    COLUMNS,
    ENDS,
    EXPORTS,
    IS_INSTALLED,
    LLAMA3_1,
    LLAMA3_2,
    POCKET,
    POSITIONS,
    PREFIXES,
    PROSE,
    RECORDED,
    SPLITS,
    TEXTS,
    TOKENS,
    export_tokens,
    llama_cpp_ends,
    llama_cpp_exports,
    llama_cpp_logits,
    llama_cpp_tokens,
    write_case,
    write_ends,
    write_export,
    write_llama,
    write_tokenizer,
    write_vocabularies,
    write_vocabulary,
)

RECORD = json.loads(lzma.decompress(RECORDED.read_bytes()))
ANSWERS = {case: torch.tensor(rows) for case, rows in RECORD["logits"].items()}
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


@pytest.mark.parametrize("place", range(len(SPLITS) + len(PREFIXES)), ids=map(str, (*SPLITS, *PREFIXES)))
def test_tokens_of_a_gguf_files_tokenizer_are_llama_cpps(tmp_path, place):
    expected = RECORD["tokens"][place]
    tokenizer = diffquant.load_tokenizer(write_tokenizer(place, tmp_path))
    tokenizer.save_pretrained(tmp_path / "saved")
    for reader in (tokenizer, diffquant.load_tokenizer(tmp_path / "saved")):
        for text, tokens in zip(TEXTS, expected["tokens"], strict=True):
            assert reader.encode(text, add_special_tokens=False) == tokens
            assert reader.encode(text) == [BOS] * expected["begins"] + tokens
            assert reader.decode(tokens, clean_up_tokenization_spaces=False) == text


def test_a_file_says_whether_texts_begin_with_bos(tmp_path, monkeypatch):
    path = write_vocabulary("llama-bpe", tmp_path)
    assert diffquant.load_tokenizer(path).encode("It") == [BOS, *diffquant.load_tokenizer(path).encode("It")[1:]]
    write = GGUFWriter.add_tokenizer_pre
    monkeypatch.setattr(
        GGUFWriter, "add_tokenizer_pre", lambda self, pre: (write(self, pre), self.add_add_bos_token(False))
    )
    assert BOS not in diffquant.load_tokenizer(write_vocabulary("llama-bpe", tmp_path)).encode("It")


def test_an_unknown_way_to_split_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is 'of-tomorrow'"):
        diffquant.load_tokenizer(write_vocabulary("of-tomorrow", tmp_path))


@pytest.mark.parametrize("case", ENDS)
def test_a_text_ends_at_the_tokens_at_which_llama_cpp_stops(tmp_path, case):
    ends = GgufCheckpoint(write_ends(case, tmp_path)).config["eos_token_id"]
    assert sorted(ends if isinstance(ends, list) else [ends]) == RECORD["ends"][case]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    return {scheme: write_export(scheme, folder) for scheme in EXPORTS}


def test_llama_cpp_computes_what_exported_files_compute_here(exports):
    ids, recorded = torch.tensor([export_tokens()]), torch.tensor(RECORD["exports"]["logits"])
    ours = {
        scheme: diffquant.load(file, dtype=torch.float32)(ids).logits[0, list(POSITIONS), :COLUMNS]
        for scheme, file in exports.items()
    }
    torch.testing.assert_close(ours["16"], recorded[0], rtol=0, atol=1e-3)
    for scheme, theirs in zip(EXPORTS[1:], recorded[1:], strict=True):
        rounded = (theirs - ours[scheme]).square().mean().sqrt()
        assert rounded < 0.05
        # What 4 and 5 bits change is far more than what rounding to 8 bits does.
        assert scheme == "8:row" or (theirs - ours["16"]).square().mean().sqrt() > 4 * rounded


def test_llama_cpp_makes_the_tokens_of_an_exported_files_source(exports):
    tokenizer, found = diffquant.load_tokenizer(POCKET / "prose-transformer"), RECORD["exports"]["tokens"]
    assert found["begins"]
    assert found["tokens"] == [tokenizer.encode(text, add_special_tokens=False) for text in (PROSE, *TEXTS)]


@pytest.mark.skipif(not IS_INSTALLED, reason="needs Node and what make test-all ONLY=llama-cpp fetches")
def test_llama_cpp_computes_what_is_recorded(tmp_path, llama, exports):
    found = llama_cpp_logits([write_case(case, tmp_path, llama) for case in CASES])
    for case, rows in zip(CASES, found["logits"], strict=True):
        torch.testing.assert_close(torch.tensor(rows), ANSWERS[case], rtol=0, atol=1e-4, msg=case)
    assert llama_cpp_tokens(write_vocabularies(tmp_path)) == RECORD["tokens"]
    assert llama_cpp_ends([write_ends(case, tmp_path) for case in ENDS]) == list(RECORD["ends"].values())
    again = llama_cpp_exports(list(exports.values()))
    assert again["tokens"] == RECORD["exports"]["tokens"]
    torch.testing.assert_close(
        torch.tensor(again["logits"]), torch.tensor(RECORD["exports"]["logits"]), rtol=0, atol=0.05
    )

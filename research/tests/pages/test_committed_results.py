"""Raw files beside each other: one configuration has one result, and 16 bits are two bytes."""

import json
import math
import re
from collections import defaultdict

import pytest

from diffquant.data import pocket_models
from diffquant.source.source import open_source
from diffquant.support.xz import read_text
from research.check.markdown import read_document
from research.check.page import BENCHED, RESULTS, ROOT
from research.check.pages import verify
from research.check.raw import committed, raw

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "diffquant/data/pocket/README.md"]
PAGES += sorted((ROOT / "research/pages").glob("*.md"))
SWEEPS = committed("sweep.json")

# Two commits measured them under one address, before the code was a part of it. To be measured again.
TWICE = {f"smollm2-{name}-500{end}/sweep.json" for name, end in (("logits", ""), ("logits", "-shift"), ("onnx", ""))}


ENGLISH = ("prose-transformer", "prose-diff-v1", "prose-diff-v2")


def score_of(result):
    return result.get("score") if result.get("score") is not None else result.get("perplexity")


def test_one_configuration_has_one_result():
    results = defaultdict(dict)
    for name in SWEEPS:
        settings = raw(name)["settings"]
        tasks = {task["name"]: task for task in settings["tasks"]}
        for cell in raw(name)["cells"]:
            if cell["result"] is None or cell["model"] not in settings["models"]:
                continue
            about = [settings["models"][cell["model"]], *(cell[k] for k in ("target", "bits", "granularity"))]
            about += [tasks[cell["task"]], settings["dtype"], settings["versions"], cell.get("code")]
            about += settings["options"].get("scales", [])
            results[json.dumps(about, sort_keys=True)][name] = score_of(cell["result"])
    differing = [by_sweep for by_sweep in results.values() if len(set(by_sweep.values())) > 1]
    assert {name for by_sweep in differing for name in by_sweep} == TWICE, differing


@pytest.mark.parametrize("name", SWEEPS)
def test_16_bits_store_two_bytes_a_weight(name):
    parameters = {
        each["fingerprint"]: each["parameters"]
        for file in committed("*.json")
        if file.startswith("figure8-") and "parameters" in (each := raw(file))
    }
    models = raw(name)["settings"]["models"]
    heavier = [
        cell["model"]
        for cell in raw(name)["cells"]
        if cell["result"] and not cell["target"] and models.get(cell["model"]) in parameters
        if cell["result"]["stored"]["weights"] > 2.05 * parameters[models[cell["model"]]]
    ]
    assert not heavier


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_raw_file_and_test_that_a_page_names_is_there(page):
    folders = "bench/results|tests|research|studies|examples"
    named = re.findall(rf"`((?:{folders})/[\w./*-]+)`", page.read_text(encoding="utf-8"))
    # "research/results/figure8-*/" stands for several.
    assert not [name for name in named if not [*ROOT.glob(name.rstrip("/")), *ROOT.glob(f"{name}.xz")]]


# Files of English models that hold no fingerprint, and of other seeds of the same rate.
UNNAMED = {"bench/results/quantize-default/prose-diff-v1.json", "bench/results/serving-hellaswag.json"}
OTHER_SEEDS = {f"research/results/figure8-prose-kl-seed-1/{name}.json" for name in ENGLISH}


def test_results_on_english_models_are_of_those_that_the_pocket_page_tells_from_todays():
    page = (ROOT / "diffquant/data/pocket/README.md").read_text(encoding="utf-8")
    earlier = re.findall(r"`([0-9a-f]{12})`", page.partition("### The models of one rate")[2])
    assert len(earlier) == 2 * len(ENGLISH)
    todays = [open_source(folder).fingerprint for folder in pocket_models("prose")]
    assert not [each for each in todays if each.startswith(tuple(earlier))]
    files = [file for folder in (RESULTS, BENCHED) for file in folder.rglob("*.json*")]
    texts = {str(file.relative_to(ROOT)).removesuffix(".xz"): read_text(file) for file in files}
    of_english = {name for name, text in texts.items() if re.search(rf'"([^"]*/)?({"|".join(ENGLISH)})"', text)}
    assert {name for name in of_english if not any(each in texts[name] for each in earlier)} == UNNAMED | OTHER_SEEDS


def test_the_faults_that_verify_is_said_to_refuse_are_planted():
    tables = read_document(ROOT / verify.PAGE.name, verify.PAGE.name).tables
    listed = {row.label: row.cells[1].split("; ") for table in tables if "faults" in table.heads for row in table.rows}
    assert listed == verify.FAULTS


def test_the_claims_name_every_result():
    """What is measured and committed bears on some claim; what bears on none is to be deleted."""
    claims = (ROOT / "research/pages/claims.md").read_text(encoding="utf-8")
    files = [file for folder in (RESULTS, BENCHED) for file in folder.iterdir()]
    results = {file.name.removesuffix(".xz") for file in files if file.is_dir() or ".json" in file.name}
    assert not results - named_in(claims)


def test_a_result_is_named_as_a_whole():
    """`kv-decoded` and `gen-amd.json` name neither `kv` nor `generate.json`."""
    text = "`research/results/kv-decoded/`, `bench/results/gen-amd.json` and `research/results/smollm2-search/a.json`"
    assert named_in(text) == {"kv-decoded", "gen-amd.json", "smollm2-search"}


def named_in(text):
    """Names of the files and folders of results that a text has."""
    return set(re.findall(r"(?:bench|research)/results/([\w.-]+)", text))


def test_the_claims_name_what_uncommitted_trees_measured():
    claims = (ROOT / "research/pages/claims.md").read_text(encoding="utf-8").partition("## Raw files and their code")[2]
    files = [file for folder in (RESULTS, BENCHED) for file in folder.rglob("*.json*")]
    changed = {str(file.relative_to(ROOT)).removesuffix(".xz") for file in files if "+changes" in read_text(file)}
    assert {name for name in changed if f"`{name}`" in claims} == changed


def test_raw_files_and_pictures_are_small():
    folders = (RESULTS, BENCHED, ROOT / "research" / "figure8" / "results")
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    most = {".png": 55_000, ".xz": math.inf}
    large = [str(file) for file in files if file.stat().st_size > most.get(file.suffix, 50_000)]
    assert not large, f"compress them (xz -9e FILE), or draw less: {', '.join(large)}"

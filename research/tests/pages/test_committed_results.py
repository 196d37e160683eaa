"""Raw files beside each other: one configuration has one result, and what pages name is there."""

import json
import math
import re
from collections import defaultdict

import pytest

from diffquant.data import pocket_models
from diffquant.support.files import read_text_or_xz
from research.pages.raw import BENCHED, RESULTS, TRAININGS, folder, raw
from research.pages.render import ROOT
from tests.docs.commands import PAGES as GUIDES

PAGES = [page for page in GUIDES if page.name != "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "research/pages").glob("*.md"))
SWEEPS = sorted(str(file.relative_to(folder())).removesuffix(".xz") for file in folder().rglob("sweep.json*"))
# Two commits measured them under one address, before the code was a part of it.
TWICE = {f"smollm2-{name}-500/sweep.json" for name in ("logits", "onnx")}


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
    assert {name for by_sweep in differing for name in by_sweep} <= TWICE, differing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_raw_file_and_test_that_a_page_names_is_there(page):
    folders = "bench/results|tests|research|studies|examples"
    named = re.findall(rf"`((?:{folders})/[\w./*-]+)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not [*ROOT.glob(name.rstrip("/")), *ROOT.glob(f"{name}.xz")]]


def test_results_of_trees_with_uncommitted_changes_are_named():
    claims = (ROOT / "research/pages/claims.md").read_text(encoding="utf-8")
    places = [ROOT / place for place in (RESULTS, BENCHED, TRAININGS)]
    # The record of README's commands names the tree that the tutorial's were recorded in.
    files = [file for place in places for file in place.rglob("*.json*") if file.name != "transcripts.json"]
    changed = {str(file.parent.relative_to(ROOT)) for file in files if "+changes" in read_text_or_xz(file)}
    assert not {place for place in changed if f"`{place}/`" not in claims}


def test_the_pocket_page_tells_the_models_of_one_rate_from_todays():
    page = (ROOT / "diffquant/data/pocket/README.md").read_text(encoding="utf-8")
    earlier = re.findall(r"`([0-9a-f]{12})`", page.partition("### The models of one rate")[2])
    of_english = [raw(f"kv-decoded/{model.name}.json")["settings"]["fingerprint"] for model in pocket_models("prose")]
    assert all(each.startswith(tuple(earlier)) for each in of_english)


def test_raw_files_and_pictures_are_small():
    files = [file for place in (RESULTS, BENCHED, TRAININGS) for file in (ROOT / place).rglob("*") if file.is_file()]
    most = {".png": 55_000, ".xz": math.inf}
    large = [str(file) for file in files if file.stat().st_size > most.get(file.suffix, 50_000)]
    assert not large, f"compress them (xz -9e FILE), or draw less: {', '.join(large)}"

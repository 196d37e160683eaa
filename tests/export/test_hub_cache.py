"""Exported folders as the hub's client lays them out in its cache: links to blobs, which no other link may imitate."""

import os
import shutil

import pytest
from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.file_download import _create_symlink, repo_folder_name

import diffquant
from diffquant.errors import CheckpointError
from diffquant.onnx import verify
from diffquant.onnx.files import model_file
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.support.digests import content_digest
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(folder, cache, name, inside=""):
    """A snapshot in a cache that huggingface_hub itself takes for its own."""
    repository = cache / repo_folder_name(repo_id=f"me/{name}", repo_type="model")
    snapshot = repository / "snapshots" / COMMIT
    for file in (each for each in folder.rglob("*") if each.is_file()):
        blob = repository / "blobs" / content_digest(file, "sha256")
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        pointer = snapshot / inside / file.relative_to(folder)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        _create_symlink(str(blob), str(pointer), new_blob=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    found = scan_cache_dir(cache)
    assert not found.warnings
    assert f"me/{name}" in {each.repo_id for each in found.repos}
    assert snapshot_download(f"me/{name}", cache_dir=cache, local_files_only=True) == str(snapshot)
    return snapshot / inside


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("source") / "model", "diffllama", vocab_size=tiny_lm.WORDS)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[{}, {"portable": True}, {"weights": "4:g32", "kv": 8}], ids=str)
def folder(request, source, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "out"
    diffquant.export(source, out, **request.param)
    return out


@pytest.mark.parametrize("inside", ["", "int4/onnx-export"], ids=["the repository", "a folder in it"])
def test_a_cached_export_runs_verifies_and_is_evaluated(source, folder, tmp_path, inside):
    snapshot = cached(folder, tmp_path / "hub", "model", inside)
    assert model_file(snapshot).is_symlink()
    assert diffquant.run(snapshot, "the", max_new_tokens=3) == diffquant.run(folder, "the", max_new_tokens=3)
    if not inside:
        assert verify(snapshot, source, threads=1).passed
        scores = [
            diffquant.evaluate(each, "perplexity", characters=600, device="cpu")["perplexity"].score
            for each in (snapshot, folder)
        ]
        assert scores[0] == scores[1]


def test_links_that_lead_elsewhere_are_refused(folder, tmp_path):
    snapshot = cached(folder, tmp_path / "hub", "model")
    data = next(each for each in model_file(snapshot).parent.iterdir() if "data" in each.name)
    blob = data.resolve()
    # Another repository's blobs, beside its own, a folder in its own, and anywhere.
    names = ("hub/models--me--other/blobs/x", "hub/models--me--model/x", "hub/models--me--model/blobs/inner/x", "x")
    places = [tmp_path / name for name in names]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(blob, place)
        data.unlink()
        data.symlink_to(os.path.relpath(place, data.parent))
        with pytest.raises(CheckpointError, match="is a link that leads out of the folder"):
            OnnxModel(snapshot)
    data.unlink()
    data.symlink_to(data.name)
    with pytest.raises(CheckpointError, match="is missing"):
        OnnxModel(snapshot)


def test_an_absolute_link_to_its_own_blobs_is_followed(folder, tmp_path):
    snapshot = cached(folder, tmp_path / "hub", "model")
    data = next(each for each in model_file(snapshot).parent.iterdir() if "data" in each.name)
    blob = data.resolve()
    data.unlink()
    data.symlink_to(blob)
    OnnxModel(snapshot)

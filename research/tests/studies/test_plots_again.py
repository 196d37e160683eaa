"""Pictures and their numbers: what is committed can be drawn again from the raw files beside it."""

import lzma
import shutil

import pytest

from diffquant.errors import UsageError
from research.studies.plots import RESULTS, ROOT, drawings, is_stale, main, stale_pictures

PICTURES = sorted(picture for folder in RESULTS for picture in folder.rglob("*.png"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: str(picture.relative_to(ROOT)))
def test_the_command_knows_every_committed_picture(picture):
    assert picture.name in drawings(picture.parent), (
        f"{picture}: no program draws it from the raw files beside it; add them to research/studies/plots.py"
    )


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: str(picture.relative_to(ROOT)))
def test_every_committed_picture_is_of_todays_numbers_and_code(picture):
    assert not is_stale(picture), f"{picture} was drawn from other numbers or by other code: make pages"


def test_a_picture_is_drawn_from_its_folders_raw_files(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "rounding"
    for name in ("rounding/prose-diff-v1.json.xz", "rounding/prose-diff-v1.png", "codebooks/prose-diff-v1.json.xz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(RESULTS[0] / name, tmp_path / name)
    picture, raw_file = folder / "prose-diff-v1.png", folder / "prose-diff-v1.json.xz"
    picture.write_bytes(b"")
    main([folder])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not is_stale(picture)
    drawings.cache_clear()
    raw_file.write_bytes(raw_file.read_bytes() + lzma.compress(b"\n"))
    monkeypatch.setattr("research.studies.plots.RESULTS", (tmp_path,))
    assert stale_pictures() == [picture]
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_picture_without_numbers_is_named(tmp_path):
    (tmp_path / "what.png").write_bytes(b"")
    with pytest.raises(UsageError, match=r"nothing here draws .*what\.png"):
        main([tmp_path])

"""Pictures and their numbers: what is committed can be drawn again from the raw files beside it."""

import lzma
import shutil

import pytest

from diffquant.errors import UsageError
from research.studies.plots import RESULTS, ROOT, drawings, is_stale, main

PICTURES = sorted(picture for folder in RESULTS for picture in folder.rglob("*.png"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: str(picture.relative_to(ROOT)))
def test_the_command_knows_every_committed_picture(picture):
    assert picture.name in drawings(picture.parent), (
        f"{picture}: no program draws it from the raw files beside it; add them to research/studies/plots.py"
    )


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: str(picture.relative_to(ROOT)))
def test_every_committed_picture_is_of_todays_numbers_and_code(picture):
    assert not is_stale(picture), f"{picture} was drawn from other numbers or by other code: make plots"


@pytest.mark.parametrize(
    ("name", "pictures"),
    [("pocket-needle-lengths", ["places.png"]), ("figure8-needle-kl", ["kl.png", "prediction.png"])],
)
def test_pictures_are_drawn_from_their_folders_raw_files(name, pictures, tmp_path, capsys):
    folder = shutil.copytree(RESULTS[0] / name, tmp_path / name)
    pictures = [folder / picture for picture in pictures]
    for picture in folder.glob("*.png"):
        picture.write_bytes(b"")
    # One that is kept is found; the others are named.
    main([folder, *(picture for picture in pictures if not picture.exists())])
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert not any(map(is_stale, pictures))
    drawings.cache_clear()
    raw_file = next(folder.glob("*.json.xz"))
    raw_file.write_bytes(raw_file.read_bytes() + lzma.compress(b"\n"))
    assert any(map(is_stale, pictures))
    assert len(capsys.readouterr().out.splitlines()) == len(pictures) > 0


def test_a_picture_without_numbers_is_named(tmp_path):
    (tmp_path / "what.png").write_bytes(b"")
    with pytest.raises(UsageError, match=r"nothing here draws .*what\.png"):
        main([tmp_path])

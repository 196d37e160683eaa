"""The files that a run writes: texts, pictures, and a page that leads to them."""

import errno

import pytest

from diffquant.errors import UsageError
from diffquant.reports.page import Report, Section, format_settings, write_run


def nothing_to_draw(path):
    raise UsageError(f"nothing to plot in {path.name}")


def test_a_run_leaves_texts_pictures_and_a_page_that_leads_to_them(tmp_path):
    folder = tmp_path / "new" / "my run"
    pictures = {"plot.png": lambda path: path.write_bytes(b"a picture")}
    seen = []

    def report(name, files):
        seen.append((name, list(files)))
        return Report(
            "sweep", name, ["It worked."], "", [Section("Settings", [format_settings({"bits": [8, 4]})])], files
        )

    written = write_run(folder, {"table.csv": "a,b\n"}, pictures, "report.html", report, ["sweep.json"])
    assert written == [folder / name for name in ("table.csv", "plot.png", "report.html")]
    assert seen == [("my run", ["sweep.json", "table.csv", "plot.png"])]
    assert (folder / "table.csv").read_text() == "a,b\n"
    text = (folder / "report.html").read_text()
    assert all(f'href="./{name}"' in text for name in ("sweep.json", "table.csv", "plot.png"))


def test_a_picture_without_data_is_left_out_and_an_earlier_one_goes(tmp_path):
    (tmp_path / "plot.png").write_bytes(b"of an earlier run")
    written = write_run(
        tmp_path,
        {},
        {"plot.png": nothing_to_draw},
        "report.html",
        lambda name, files: Report("sweep", name, [], "", [], files),
    )
    assert written == [tmp_path / "report.html"]
    assert not (tmp_path / "plot.png").exists()


def test_a_picture_that_fails_halfway_leaves_the_earlier_one(tmp_path):
    def fail_halfway(path):
        path.write_bytes(b"half a pic")
        raise OSError(errno.ENOSPC, "no space")

    (tmp_path / "plot.png").write_bytes(b"of an earlier run")
    with pytest.raises(OSError, match="no space"):
        write_run(tmp_path, {}, {"plot.png": fail_halfway}, "report.html", lambda *_: None)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("plot.png", b"of an earlier run")]


def test_settings_are_words_and_what_is_empty_is_left_out():
    values = {"a": None, "b": "", "c": [], "d": (), "e": False, "f": 0, "g": {"name": "x", "k": 1, "l": None}}
    values["h"] = [1, 2]
    assert format_settings(values) == {"e": "no", "f": "0", "g": "k 1", "h": "1, 2"}

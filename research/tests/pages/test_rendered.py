"""Pages of results are what their templates render, and change with any number of any raw file."""

import json
import random
import re
import shutil
from contextlib import contextmanager
from fnmatch import fnmatch

import pytest
from jinja2 import UndefinedError

from diffquant.errors import DiffQuantError, UsageError
from diffquant.support.files import read_text_or_xz
from research.figure8 import plan
from research.pages import __main__ as program
from research.pages import raw, render
from research.studies import formats
from tests.support.thorough import thorough

FOLDERS = (raw.RESULTS, raw.BENCHED, raw.TRAININGS)
LISTED = re.compile(r"^\| `((?:research|bench)/[\w./-]+)` \| ([0-9a-f]{8}) \|", re.MULTILINE)
# What every page shows of its raw files beside figures.
DIGESTS = re.compile(r"\| [0-9a-f]{8} \|")
SEED = 20261129


@pytest.fixture(scope="module")
def rendered():
    return render.outputs()


def test_every_page_is_what_its_template_renders(rendered):
    stale = [str(page) for page, text in rendered.items() if page.read_text(encoding="utf-8") != text]
    assert not stale, f"make pages: {stale}"


def test_each_page_of_results_has_a_template():
    pages = {file.name for file in render.HERE.glob("*.md")}
    assert {f"{page}.j2" for page in pages} | {render.BLOCKS} == {file.name for file in render.HERE.glob("*.j2")}


def test_a_figure_edited_on_a_page_fails_the_check(tmp_path, monkeypatch, rendered):
    page = render.HERE / "kv.md"
    edited = tmp_path / "kv.md"
    edited.write_text(re.sub(r"\d\.\d\d", "9.99", rendered[page], count=1), encoding="utf-8")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "outputs", lambda: {edited: rendered[page]})
    with pytest.raises(UsageError, match=r"kv\.md"):
        program.main(check=True)
    program.main()
    program.main(check=True)


def test_words_that_no_longer_hold_stop_the_rendering():
    template = render.environment().from_string('{{ holds(1 > 2, "is larger") }}')
    with pytest.raises(render.DoesNotHoldError, match="is larger"):
        template.render()
    with pytest.raises(UndefinedError):
        render.environment().from_string("{{ nothing }}").render()


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        ("{{ -0.123 | fixed }}", "−0.12"),
        ("{{ 1234.5 | fixed(0) }}", "1,234"),
        ("{{ 0.5 | signed }}", "+0.50"),
        ("{{ 0.385 | percent }}", "38 %"),
        ("{{ [0.36, 0.381] | shares }}", "36 to 38 %"),
        ("{{ [2, 2.001] | span(1) }}", "2.0"),
        ("{{ 0.00012 | digits(2) }}", "0.00012"),
    ],
)
def test_figures_are_shown_as_pages_have_them(shown, wanted):
    assert render.environment().from_string(shown).render() == wanted


def test_a_block_that_no_page_asks_for_is_an_error(monkeypatch):
    monkeypatch.setattr(render, "_BLOCK", re.compile(r"(<!-- never: (\w+) -->)()(<!-- end -->)"))
    with pytest.raises(UsageError, match="do not have the same blocks"):
        render.outputs()


def raw_files():
    return sorted(
        str(file.relative_to(render.ROOT)).removesuffix(".xz")
        for folder in FOLDERS
        for file in (render.ROOT / folder).rglob("*")
        if file.is_file() and file.suffix != ".png"
    )


def uses():
    """Raw files and folders that each page lists."""
    texts = {page.name: page.read_text(encoding="utf-8") for page in render.HERE.glob("*.md")}
    return {name: [place for place, _ in LISTED.findall(text)] for name, text in texts.items() if LISTED.search(text)}


def test_every_raw_file_is_used_by_a_page():
    """A raw file that no page is rendered from is to be deleted."""
    listed = [place for places in uses().values() for place in places] + ["research/results/transcripts.json"]
    unused = [
        file
        for file in raw_files()
        if not any(fnmatch(file, place) or file.startswith(f"{place}/") for place in listed)
    ]
    assert not unused


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_in(value, path=()):
    """Places of all numbers in plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [place for key, each in items for place in numbers_in(each, (*path, key))]
    return [path, *inner] if is_number(value) else inner


class Seen:
    """Lists and dictionaries of a raw file that note which numbers are read."""

    def __init__(self):
        self.places = set()

    def of(self, value, file, path=()):
        if is_number(value):
            self.places.add((file, path))
        kind = _Dict if isinstance(value, dict) else _List if isinstance(value, list) else None
        return value if kind is None else kind(value, self, file, path)


class _Noted:
    def __init__(self, value, seen, file, path):
        super().__init__(value)
        self._note = lambda each, key: seen.of(each, file, (*path, key))


class _Dict(_Noted, dict):
    def __getitem__(self, key):
        return self._note(super().__getitem__(key), key)

    def get(self, key, default=None):
        try:
            return self[key]
        except KeyError:
            return default

    def items(self):
        return {key: self[key] for key in self}.items()

    def values(self):
        return [self[key] for key in self]


class _List(_Noted, list):
    def __getitem__(self, key):
        if isinstance(key, slice):
            return [self[number] for number in range(len(self))[key]]
        return self._note(super().__getitem__(key), key % len(self))

    def __iter__(self):
        return (self[number] for number in range(len(self)))


def alter(data, path, by):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = data[path[-1]] * by + 1


def listed_places(file, places):
    """The places, of those that a page lists, which hold a raw file."""
    return [place for place in places if file == place or file.startswith(f"{place}/")]


def drawn_of_all(chance, count):
    """Any numbers of any raw files: a file, and then a number in it."""
    files = [file for file in raw_files() if file.endswith(".json") and not file.endswith("transcripts.json")]
    for _ in range(count):
        file = chance.choice(files)
        yield file, chance.choice(numbers_in(json.loads(read_text_or_xz(render.ROOT / file))))


def drawn_of_read(chance, count, monkeypatch):
    """Numbers that pages read: a file, and then a number."""
    seen = Seen()

    def noted(file):
        return seen.of(json.loads(read_text_or_xz(file)), str(file.relative_to(render.ROOT)).removesuffix(".xz"))

    with monkeypatch.context() as patched:
        for module in (raw, plan, formats):
            patched.setattr(module, "read_json", noted)
        render.forget()
        seen.places.clear()
        render.outputs()
    render.forget()
    by_file = {}
    for file, path in sorted(seen.places, key=repr):
        by_file.setdefault(file, []).append(path)
    for _ in range(count):
        file = chance.choice(sorted(by_file))
        yield file, chance.choice(by_file[file])


@pytest.fixture
def altered(tmp_path, monkeypatch):
    """A context within which pages read a copy of the raw files in which one number is another."""
    for folder in FOLDERS:
        shutil.copytree(render.ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(raw, "ROOT", tmp_path)

    @contextmanager
    def altering(file, path, by):
        data = json.loads(read_text_or_xz(tmp_path / file))
        alter(data, path, by)
        stored = next(each for each in (tmp_path / file, tmp_path / f"{file}.xz") if each.exists())
        kept = stored.read_bytes()
        stored.unlink()
        (tmp_path / file).write_text(json.dumps(data), encoding="utf-8")
        try:
            yield
        finally:
            (tmp_path / file).unlink()
            stored.write_bytes(kept)

    return altering


def test_any_number_altered_in_a_raw_file_changes_a_digest_on_each_page_that_lists_it(altered):
    digests = {place: digest for name in uses() for place, digest in LISTED.findall((render.HERE / name).read_text())}
    for file, path in drawn_of_all(random.Random(SEED), 20):
        with altered(file, path, 1.5):
            for name, places in uses().items():
                if holding := listed_places(file, places):
                    assert all(raw.digest(place) != digests[place] for place in holding), (name, file, path)


@thorough
def test_of_sixty_numbers_that_modules_read_two_thirds_change_more_than_a_digest(altered, monkeypatch, rendered):
    """Modules read more than their pages print: the rest (10 of 60 when this was written) only moves a digest.

    A learning rate that was not the best, one window of a format that no table has, a key that rows are found by.
    """

    def pages_alter(file):
        pages = sorted(name for name, places in uses().items() if listed_places(file, places))
        try:
            for page in pages:
                render.forget(f"{page}.j2")
            after = "".join(render.page_text(f"{page}.j2") for page in pages)
        except (DiffQuantError, LookupError, ArithmeticError, ValueError, TypeError, StopIteration):
            return True
        return DIGESTS.sub("", "".join(rendered[render.HERE / page] for page in pages)) != DIGESTS.sub("", after)

    with monkeypatch.context() as patched:
        patched.setattr(raw, "ROOT", render.ROOT)
        drawn = list(drawn_of_read(random.Random(SEED), 60, monkeypatch))
    unseen = []
    for file, path in drawn:
        with altered(file, path, 3.0):
            unseen += [] if pages_alter(file) else [(file, path)]
    monkeypatch.undo()
    render.forget()
    print(f"{60 - len(unseen)} of 60 numbers that are read change a figure or break a page")
    assert len(unseen) <= 20, unseen

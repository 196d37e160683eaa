"""The check of pages notices what is altered on them, in words as in figures."""

from research.check.alterations import Alteration, audited, drawn
from research.check.declared import DECLARED

PAGES = {page.name: page for page in DECLARED}


def missed(alterations, tmp_path):
    """Those that the check of their page does not notice."""
    return [each.change for each in alterations if not is_noticed(each, tmp_path)]


def is_noticed(alteration: Alteration, tmp_path) -> bool:
    file = tmp_path / "page.md"
    file.write_text(alteration.text, encoding="utf-8")
    return bool(PAGES[alteration.page].check(file))


def test_nine_in_ten_of_an_audits_alterations_are_noticed(tmp_path):
    alterations = list(audited())
    assert len(alterations) >= 60, "the sentences of many of the 67 are gone: put others in audited.json"
    unnoticed = missed(alterations, tmp_path)
    assert len(unnoticed) <= len(alterations) // 10, "\n".join(unnoticed)


def test_nine_in_ten_of_sixty_words_drawn_at_random_are_noticed(tmp_path):
    unnoticed = missed(drawn(DECLARED, 60, seed=2026), tmp_path)
    assert len(unnoticed) <= 6, "\n".join(unnoticed)


def test_without_its_list_a_page_is_checked_by_what_is_computed_alone(tmp_path, monkeypatch):
    """The two tests above can fail: with every sentence listed as it is altered, words go by unnoticed."""
    monkeypatch.setattr("research.check.checks.unread_faults", lambda *_: [])
    assert len(missed(drawn(DECLARED, 60, seed=2026), tmp_path)) > 6

"""CITATION.cff says what pyproject.toml says."""

import tomllib

import yaml

from tests.docs.commands import ROOT


def test_the_citation_has_the_version_and_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])

"""The notebook: it runs from top to bottom, and is kept without what a run leaves in it."""

import json

import pytest

from tests.docs.commands import ROOT
from tests.support.thorough import thorough

NOTEBOOK = ROOT / "examples" / "tour.ipynb"


@thorough
def test_the_notebook_runs_and_its_models_name_the_number(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()

    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    answers = [data["text/plain"].strip("'\" ") for data in shown if "image/png" not in data]
    assert answers == ["42", "42"]
    assert len([data for data in shown if "image/png" in data]) == 2


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count") is not None]

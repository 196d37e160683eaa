"""The notebook: it runs from top to bottom, teaches public names alone, and is kept with what a run shows."""

import ast
import json

import pytest

import diffquant
from tests.docs.commands import ROOT
from tests.support.thorough import thorough

NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def shown_by(cells):
    """What cells show at their end, each by its types."""
    return [output["data"] for cell in cells for output in cell.get("outputs", ()) if "data" in output]


def answers_in(shown):
    return ["".join(data["text/plain"]).strip("'\" ") for data in shown if set(data) == {"text/plain"}]


@thorough
def test_the_notebook_runs_and_its_models_name_the_number(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = shown_by(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()

    shown = shown_by(notebook.cells)
    assert answers_in(shown) == answers_in(kept) == ["42", "42", "42"]
    assert [sorted(data) for data in shown] == [sorted(data) for data in kept]
    # What a model is comes from its headers, and so does not differ between machines.
    assert shown[0]["text/html"] == "".join(kept[0]["text/html"])


def test_the_notebook_is_kept_with_what_it_shows():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"execute_result", "display_data"}
    assert len([data for data in shown_by(cells) if "image/png" in data]) == 1
    assert "/home/" not in json.dumps(outputs)
    assert str(ROOT) not in json.dumps(outputs)


def test_the_notebook_teaches_public_names_alone():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    tree = ast.parse("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    nodes = list(ast.walk(tree))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"pathlib", "shutil", "diffquant"}
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "diffquant"
    }
    assert {"inspect", "sweep", "quantize", "export", "run"} < used
    assert used - {"__file__"} < set(diffquant.__all__)

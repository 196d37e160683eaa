"""How the bench names what it imports."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_projects_modules_are_imported_by_name_and_not_by_string():
    for file in sorted((ROOT / "bench").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                what = ast.unparse(node.args[0])
                assert "diffquant" not in what, f"{file}: {what}"
                assert not what.lstrip("f'\"").startswith("."), f"{file}: {what}"

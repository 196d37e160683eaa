"""What the studies' programs say of themselves, and how they name what they import."""

import ast
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from diffquant.errors import UsageError
from research.pages.render import ROOT
from research.studies import rounding


def test_the_projects_modules_are_imported_by_name_and_not_by_string():
    for file in sorted((ROOT / "research").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                what = ast.unparse(node.args[0])
                assert "diffquant" not in what, f"{file}: {what}"
                assert not what.lstrip("f'\"").startswith("."), f"{file}: {what}"


@pytest.mark.parametrize("module", [f"research.studies.{name}" for name in ("figure8", "rounding")])
def test_every_program_says_what_it_does_and_what_its_options_are(module):
    program = typer.Typer()
    program.command()(import_module(module).main)
    command = typer.main.get_command(program)
    assert command.help.endswith(".")
    assert all(parameter.help for parameter in command.params if parameter.name != "help")
    assert CliRunner().invoke(program, ["--no-such-option"]).exit_code == 2


def test_a_rounding_contest_needs_one_model_and_a_file(tmp_path):
    with pytest.raises(UsageError, match="one model and --json"):
        rounding.main([tmp_path])
    with pytest.raises(UsageError, match="one model and --json"):
        rounding.main([tmp_path, tmp_path], file=tmp_path / "out.json")

"""A verb is one function: what Python gives as a parameter the command line gives as an option of the same name."""

import inspect
import json
import logging
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import diffquant
from diffquant import verbs
from diffquant.data import pocket_models
from diffquant.errors import FailedCellsError, UsageError
from diffquant.measure.tasks import task_options
from diffquant.recipe import Recipe
from diffquant.recipe.presets import PRESETS
from diffquant.verbs import recipes
from diffquant.verbs.cli import app
from diffquant.verbs.cli.command import command_name, make_command
from diffquant.verbs.cli.options import former_names, list_options
from diffquant.verbs.cli.show import VIEWS, ResultView
from diffquant.verbs.kinds import Model, Prompt
from diffquant.verbs.notes import say, say_after_result, say_files_written
from diffquant.verbs.recipes import recipe_from_options
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test

VERBS = [verb for group in verbs.GROUPS.values() for verb in group]
COMMANDS = typer.main.get_command(app).commands
# What only the terminal has, and what only a program can give.
TERMINALS = {"as_json", "dry_run", "details"}
PROGRAMS = {"progress", "on_plan", "on_text", "tokenizer"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("tiny") / "model")


@in_one_test("verb", VERBS)
def test_each_option_is_a_parameter_and_each_parameter_an_option_of_its_name(verb):
    parameters = inspect.signature(verb).parameters
    expected = {name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD} - PROGRAMS
    if len(expected | PROGRAMS & parameters.keys()) < len(parameters):
        expected |= {option.name for option in task_options()}
    if "recipe" in parameters:
        expected |= inspect.signature(recipe_from_options).parameters.keys()
    params = {param.name: param for param in COMMANDS[command_name(verb)].params}
    assert params.keys() - TERMINALS == expected
    for name, param in params.items():
        if param.param_type_name == "argument" or name in TERMINALS:
            continue
        words = name.replace("_", "-")
        is_inverted = name in parameters and parameters[name].default is True
        assert param.opts[0] == (f"--no-{words}" if is_inverted else f"--{words}")


@in_one_test("verb", VERBS)
def test_a_default_is_that_of_the_signature(verb):
    parameters = inspect.signature(verb).parameters
    params = {each.name: each for each in COMMANDS[command_name(verb)].params}
    for name, each in parameters.items():
        if name not in params:
            continue
        default = each.default
        if default is each.empty:
            assert params[name].required
        elif default is True:
            assert params[name].default is False
        else:
            assert (params[name].default or None) in (default or None, str(default))


def test_every_verb_is_a_name_of_the_package():
    names = {verb.__name__ for verb in VERBS}
    assert names < set(diffquant.__all__)
    for name in names:
        assert inspect.unwrap(getattr(diffquant, name)) is inspect.unwrap(getattr(verbs, name))


def test_every_entry_of_a_docstring_reaches_the_help_and_without_docstrings_the_command_line_still_parses():
    assert not [(command_name(verb), each.name) for verb in VERBS for each in list_options(verb) if len(each.help) < 10]
    command = [sys.executable, "-OO", "-m", "diffquant", "quantize", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, "--weights SCHEME" in done.stdout) == (0, True), done.stderr


@in_one_test(
    ("name", "words", "expected"),
    [
        ("sweep", "m -o out --task nll --target kv --granularity row --recipe r.yaml", ["nll", "kv", "row", "r.yaml"]),
        ("sweep", "m -o out --tasks nll --targets kv --granularities row", ["nll", "kv", "row"]),
        ("search", "m -o out --budget 4 --target k,v", ["k,v"]),
        ("quantize", "m -o out --override *.mlp.*=8", ["*.mlp.*=8"]),
    ],
)
def test_names_that_options_had_still_work_and_are_not_shown(name, words, expected):
    verb = COMMANDS[name]
    given = verb.make_context(name, words.split()).params
    found = [given[key] for key in ("tasks", "targets", "granularities", "recipes", "overrides") if given.get(key)]
    found = [each for each in found if each != "hellaswag"]
    assert [str(each[0]) if isinstance(each, list | tuple) else each for each in found] == expected
    shown = {word for each in verb.params for word in each.opts}
    assert former_names(getattr(verbs, name)).keys() & {word.lstrip("-") for word in shown} == set()


def test_a_flag_turns_off_what_is_on_and_what_only_the_terminal_has_stays_there(monkeypatch, capsys):
    seen = {}

    def toy(model: Model, *, cache: bool = True, on_text: object = None):
        """Be a toy.

            diffquant toy model

        Args:
            model: see `export`.
            cache: False leaves the cache out.
            on_text: function called with text.

        Raises:
            UsageError: with what was made.
        """
        seen.update(model=model, cache=cache, said=on_text)
        raise UsageError("half made", {"half": 1})

    monkeypatch.setitem(VIEWS, "toy", ResultView(lambda made, _: f"made {made}", lambda made, _: json.dumps(made)))
    program = typer.Typer()
    program.command()(make_command(toy))
    monkeypatch.setattr(sys, "argv", ["toy", ".", "--no-cache", "--json"])
    with pytest.raises(UsageError, match="half made"):
        program(standalone_mode=False)
    assert seen == {"model": Path("."), "cache": False, "said": None}
    assert json.loads(capsys.readouterr().out) == {"half": 1}
    monkeypatch.setattr(sys, "argv", ["toy", "."])
    with pytest.raises(UsageError):
        program(standalone_mode=False)
    assert (seen["cache"], seen["said"] is None) == (True, False)
    assert capsys.readouterr().out == "made {'half': 1}\n"


def test_a_dash_reads_the_prompt_from_standard_input_and_notes_go_beside_the_result(monkeypatch):
    def toy(prompt: Prompt) -> str:
        """Be a toy.

            diffquant toy

        No more.
        """
        say_after_result("0.1 s", aside=True)
        say_files_written(["a.txt", Path("b.txt")])
        say("at once")
        return prompt.upper()

    monkeypatch.setitem(VIEWS, "toy", ResultView(data=lambda text, _: json.dumps(text)))
    program = typer.Typer()
    program.command()(make_command(toy))
    shown = CliRunner().invoke(program, ["--prompt", "-"], input="from stdin")
    assert (shown.stdout, shown.stderr) == ("FROM STDIN\nwrote a.txt, b.txt\n", "at once\n0.1 s\n")
    shown = CliRunner().invoke(program, ["--prompt", "-x", "--json"])
    assert (json.loads(shown.stdout), shown.stderr) == ("-X", "at once\n0.1 s\nwrote a.txt, b.txt\n")
    shown = CliRunner().invoke(program, ["--prompt", "-"], input=b"caf\xe9")
    assert "standard input is not UTF-8 text" in str(shown.exception)


@in_one_test("name", ["generate", "run"])
def test_a_text_that_came_in_pieces_ends_its_line(name, monkeypatch):
    def toy(prompt: Prompt, *, on_text: object = None) -> str:
        """Be a toy.

            diffquant toy

        No more.
        """
        say_after_result("2 tokens", aside=True)
        for piece in (prompt, " and"):
            on_text(piece)
        return f"{prompt} and"

    monkeypatch.setitem(VIEWS, "toy", VIEWS[name])
    program = typer.Typer()
    program.command()(make_command(toy))
    shown = CliRunner().invoke(program, ["--prompt", "once"])
    assert (shown.stdout, shown.output) == ("once and\n", "once and\n2 tokens\n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": 8, "kv": 8}, "recipe cannot be combined with kv"),
        ({"preset": "int4", "weights": 4, "residual": 0}, "preset cannot be combined with weights, residual"),
        ({"recipe": 8, "preset": "int4"}, "recipe and preset both set the recipe"),
        ({"preset": "int5"}, f"unknown preset 'int5'; choose from {', '.join(PRESETS)}"),
        ({"overrides": ["q_proj"]}, "expected PATTERN=SCHEME"),
        ({"weights": 4, "residual": 64}, "residual 64 keeps the newest tokens of a quantized cache: quantize kv, too"),
        ({"kv": 16, "residual": 64, "overrides": ["*.mlp.*=8"]}, "residual 64 keeps the newest tokens"),
        ({"overrides": ["*.k=8", "*.v=8", "*.k=4"]}, r"overrides has '\*\.k' twice; keep one of each"),
    ],
)
def test_a_recipe_is_given_in_one_way(settings, message):
    with pytest.raises(UsageError, match=message):
        Recipe.parse(recipe_from_options(**settings))


def test_a_recipe_is_what_its_settings_say_and_none_without_any():
    assert recipe_from_options() is recipe_from_options(weights=None, overrides=()) is None
    expected = Recipe.of(weights="4:g32", kv=8, overrides={"*.mlp.*": "6:row"})
    assert Recipe.parse(recipe_from_options(weights="4:g32", kv="8", overrides=["*.mlp.*=6:row"])) == expected
    assert Recipe.parse(recipe_from_options(kv="16")) == Recipe()


def test_python_quantizes_with_rules_and_settings_of_the_command(tmp_path):
    model, plans = write_checkpoint(tmp_path / "model", "unilm-v2"), []
    recipe = {"weights": "4:g32", "overrides": {"*.mlp.*": "8:row"}}
    report = diffquant.quantize(model, tmp_path / "out", recipe, keep="*.q_proj.*", on_plan=plans.append)
    schemes = {error.name: str(error.scheme) for error in report.errors}
    assert not [name for name in schemes if "q_proj" in name]
    assert {scheme for name, scheme in schemes.items() if ".mlp." in name} == {"8:row"}
    assert plans[0].table()
    with pytest.raises(UsageError, match="nothing to quantize: give a recipe, such as weights='4:g32'"):
        diffquant.quantize(model, tmp_path / "other", {"kv": 16})


@in_one_test(
    ("recipe", "chosen", "named"),
    [
        ({"kv": 8}, {"effort": "best"}, "effort"),
        ({"weights": 16}, {"rounding": "gptq"}, "rounding"),
        ({"kv": 8, "rounding": "gptq"}, {}, "rounding"),
        ({"kv": 8}, {"effort": "best", "tokens": 64}, "tokens and effort"),
    ],
)
def test_a_rule_is_refused_where_no_weight_is_rounded(tmp_path, recipe, chosen, named):
    """It read a text through the whole model, for nothing."""
    with pytest.raises(UsageError, match=f"leave out {named}, or give weights='4:g32'"):
        diffquant.quantize(pocket_models("needle")[0], tmp_path / "out", recipe, **chosen)


def test_without_a_recipe_it_is_int4_by_gptq_in_a_folder_named_after_the_model(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "diffquant.verbs")
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    report = diffquant.quantize(model, tokens=64)
    assert report.destination.resolve() == tmp_path / "model-int4"
    assert report.rounding == "gptq"
    assert json.loads((tmp_path / "model-int4/diffquant.json").read_text())["rounding"]["tokens"] == 64
    assert "4:g32" in {str(error.scheme) for error in report.errors}
    # The rule depends on the number of weights alone, not on the machine, and gptq needs a tokenizer.
    monkeypatch.setattr(recipes, "GPTQ_WEIGHTS", 0)
    assert diffquant.quantize(model, "other").rounding == "mse"
    assert "effort='balanced' is more accurate" in caplog.text
    caplog.clear()
    diffquant.quantize(model, "named", "4:g16")
    assert "rounding by mse; effort='balanced' is more accurate" in caplog.text
    with pytest.raises(UsageError, match=r'no parameter group_size; use recipe=\{"weights": "4:g32"\}'):
        diffquant.quantize(model, "fourth", group_size=32)
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert diffquant.quantize(model, "third", {"logits": "4:row"}).errors == ()
    assert "no weight is quantized" in caplog.text
    assert "has no tokenizer" in caplog.text


def test_a_preset_takes_smaller_groups_where_a_width_needs_them(tmp_path):
    model = write_checkpoint(tmp_path / "model", "llama", intermediate_size=344)
    report = diffquant.quantize(model, tmp_path / "low", "int4", rounding="nearest")
    schemes = {error.name.rsplit(".", 2)[-2]: str(error.scheme) for error in report.errors}
    assert schemes["down_proj"] == "4:g8"
    assert schemes["q_proj"] == "4:g32"


def test_what_patterns_to_keep_cost_a_model_that_is_known_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, "diffquant.verbs")
    model = write_checkpoint(tmp_path / "model", "unilm-v2")
    diffquant.quantize(model, tmp_path / "kept", {"weights": "8:row"}, keep="*.q_proj.*")
    assert "with keep weights are chosen by name" in caplog.text
    assert not (tmp_path / "kept/modeling_diffquant.py").exists()
    caplog.clear()
    # What it says to write instead.
    report = diffquant.quantize(
        model, tmp_path / "overridden", {"weights": "8:row", "kv": 8, "overrides": {"*.q_proj": "16"}}
    )
    assert not [error.name for error in report.errors if "q_proj" in error.name]
    assert (tmp_path / "overridden/modeling_diffquant.py").exists()
    assert "by their names" not in caplog.text


def test_python_exports_what_only_the_command_did(tmp_path, model):
    began = time.monotonic()
    report = diffquant.export(model, tmp_path / "out", web=True, genai_device="cuda:1")
    assert 0 < report.seconds <= time.monotonic() - began
    assert (tmp_path / "out/web.json").is_file()
    assert "cuda" in (tmp_path / "out/genai_config.json").read_text()
    with pytest.raises(UsageError, match="web is float32: leave out dtype"):
        diffquant.export(model, tmp_path / "other", web=True, dtype="float16")


def test_a_shard_measures_its_part_and_writes_no_tables(tmp_path, model, caplog):
    settings = {"bits": "16", "characters": 600, "window": 64, "stride": 64, "dtype": "float32"}
    with caplog.at_level(logging.INFO, logger="diffquant.verbs"):
        first = diffquant.sweep(model, tmp_path / "out", "perplexity", **settings, shard="1/2")
        second = diffquant.sweep(model, tmp_path / "out", "perplexity", **settings, shard="2/2")
    assert [len(part.cells) for part in (first, second)] == [0, 1]
    assert "shard 2/2 is done; the same command without shard writes the tables" in caplog.text
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"cells"}
    assert diffquant.sweep(model, tmp_path / "out", "perplexity", **settings).cells == second.cells
    assert (tmp_path / "out/table.csv").exists()


def test_an_error_keeps_its_result_from_one_process_to_another():
    error = pickle.loads(pickle.dumps(FailedCellsError("2 of 3 cells failed", {"cells": 3})))
    assert (str(error), error.result) == ("2 of 3 cells failed", {"cells": 3})

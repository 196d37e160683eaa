"""A search's widths as lines for llama.cpp's quantizer, read as it reads them, and what each kind of tensor pays."""

import re
from dataclasses import replace

import gguf
import pytest

import diffquant
from diffquant.calib.search.result import group_by_kind, kinds_table, kl_per_megabit, read_search
from diffquant.calib.search.tensor_types import TYPES, check_ggml_types, check_types_output, format_tensor_types
from diffquant.errors import OutputExistsError, UsageError
from tests.support import tiny_lm
from tests.support.earlier_results import write_recorded
from tests.support.tables import in_one_test


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    file = tmp_path_factory.mktemp("search") / "search-4.5-bits.json"
    write_recorded("smollm2-search/search-4.5-bits.json", file)
    return read_search(file)


def test_every_tensor_gets_the_type_of_its_width_where_names_are_ggufs(found):
    # As parse_tensor_type_file splits the file and lowers names; the first pattern that is found in a name counts.
    lines = [line.partition("=") for line in format_tensor_types(found).split()]
    patterns = [(re.compile(pattern.lower()), kind) for pattern, _, kind in lines]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    assert len(found.measurements) == 210
    for unit in found.measurements:
        name = f"{names.get_name(unit.name)}.weight"
        kind = next(kind for pattern, kind in patterns if pattern.search(name))
        assert kind == TYPES[unit.chosen]
    known = {kind.name for kind in gguf.GGMLQuantizationType}
    assert {kind.upper() for kind in TYPES.values()} <= known
    assert not any(pattern.search("blk.0.attn_norm.weight") for pattern, _ in patterns)


def test_what_no_line_can_say_is_refused_by_name(found):
    odd = replace(found, measurements=[replace(found.measurements[0], kind="self_attn.wq_a")])
    with pytest.raises(UsageError, match=r"no tensors for self_attn\.wq_a"):
        format_tensor_types(odd)
    with pytest.raises(UsageError, match="ggml has no type for 7 bits"):
        check_ggml_types(["weights"], [4, 7])
    with pytest.raises(UsageError, match="only widths of weights"):
        check_ggml_types(["k", "v"], [4])


def test_a_kind_pays_the_sum_of_its_units_over_the_bits_they_save(found):
    assert [len(units) for units in group_by_kind(found).values()] == [30] * 7
    units = [unit for unit in found.measurements if unit.kind == "self_attn.v_proj"]
    assert group_by_kind(found)["self_attn.v_proj", "weights"] == units
    saved = sum(unit.elements for unit in units) * 12 / 1e6
    assert kl_per_megabit(units, 4) == pytest.approx(sum(unit.kl[4] for unit in units) / saved)
    (row,) = [row for row in kinds_table(found).rows if row[0] == "self_attn.v_proj"]
    assert max(units, key=lambda unit: unit.kl[4]).layer == int(row[-1])
    prices = [kl_per_megabit(units, 4) for units in group_by_kind(found).values()]
    assert prices == sorted(prices, reverse=True)


def test_a_search_writes_the_lines_where_it_is_told_and_refuses_other_widths_before_it_measures(tmp_path):
    pytest.importorskip("scipy")
    model, file = tiny_lm.write_llama(tmp_path / "llama"), tmp_path / "types.txt"
    settings = {"windows": 1, "window": 24, "characters": 200, "granularity": "row", "tensor_types": file}
    result = diffquant.search(model, tmp_path / "out", 7, bits="8,6", **settings)
    assert file.read_text() == format_tensor_types(result)
    assert file.read_text().count("=q") >= 7
    with pytest.raises(UsageError, match="ggml has no type for 7 bits"):
        diffquant.search(model, tmp_path / "other", 7, bits="8,7", **settings)
    assert not (tmp_path / "other").exists()
    check_types_output(file, tmp_path)
    diffquant.search(model, tmp_path / "new", 7, bits="8,6", **settings | {"tensor_types": tmp_path / "new" / "t.txt"})
    assert (tmp_path / "new" / "t.txt").read_text() == file.read_text()


@in_one_test(
    ("place", "error", "message"),
    [
        ("notes.txt", OutputExistsError, r"notes\.txt, which diffquant did not write"),
        ("nowhere/types.txt", UsageError, "nowhere, where types.txt would be written, does not exist"),
        ("folder", OutputExistsError, "folder, which diffquant did not write"),
    ],
)
def test_lines_replace_only_lines_and_that_is_checked_before_the_search(tmp_path, place, error, message):
    (tmp_path / "notes.txt").write_text("milk\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(error, match=message):
        diffquant.search(tmp_path / "model", tmp_path / "out", 7, bits="8,6", tensor_types=tmp_path / place)
    assert (tmp_path / "notes.txt").read_text() == "milk\n"


def test_widths_of_a_differential_model_are_refused_before_the_search(tmp_path):
    pytest.importorskip("scipy")
    model = tiny_lm.write_diff_v2(tmp_path / "v2")
    with pytest.raises(UsageError, match=r"llama\.cpp has no DIFF attention"):
        diffquant.search(
            model, tmp_path / "out", 7, bits="8,6", granularity="row", tensor_types=tmp_path / "t",
            on_plan=lambda _: pytest.fail("it went on"),
        )  # fmt: skip

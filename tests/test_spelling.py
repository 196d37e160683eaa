"""A message names a parameter as the person in front of it spells it."""

import re

import pytest

import diffquant
from diffquant.errors import OutputExistsError
from diffquant.support.names import option_name, use_option_names
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test


@in_one_test(
    ("parameter", "value", "in_python", "as_an_option"),
    [
        ("overwrite", True, "overwrite=True", "--overwrite"),
        ("cache", False, "cache=False", "--no-cache"),
        ("kv", 8, "kv=8", "--kv 8"),
        ("weights", "4:g32", "weights='4:g32'", "--weights 4:g32"),
        ("device_map", None, "device_map", "--device-map"),
    ],
)
def test_a_parameter_is_spelled_for_python_and_for_the_command_line(parameter, value, in_python, as_an_option):
    assert option_name(parameter, value) == in_python
    with use_option_names(), use_option_names():
        assert option_name(parameter, value) == as_an_option
    assert option_name(parameter, value) == in_python


def test_one_error_speaks_to_python_of_a_keyword_and_to_the_command_line_of_an_option(tmp_path, run):
    source, taken = write_checkpoint(tmp_path / "source", "unilm-v2"), tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(OutputExistsError, match=f"^{re.escape(str(taken))} exists.* pass overwrite=True$"):
        diffquant.quantize(source, taken, "4:row")
    assert run("quantize", source, "-o", taken, "--weights", "4:row")[2].endswith("pass --overwrite\n")

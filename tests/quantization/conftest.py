"""A tiny model that tests read and leave as it is."""

import pytest

from tests.support import tiny_lm


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("tiny") / "diff-v2")

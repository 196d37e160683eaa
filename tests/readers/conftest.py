"""Folders that all readers share, written where one is first asked for."""

import pytest

from tests.readers.folders import FEATURES, Folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("readers")
    return {name: Folder(root, name) for name in FEATURES}

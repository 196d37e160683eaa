"""What the tests of Figure 8's trainings read."""

import pytest

from diffquant import data


@pytest.fixture(scope="session")
def books(tmp_path_factory):
    """The bundled prose as a file to train on."""
    file = tmp_path_factory.mktemp("text") / "books.txt"
    file.write_text(data.books_text(), encoding="utf-8")
    return file

"""Tests; a package, so that `tests.support` is one name for what they share, also where no conftest is read."""

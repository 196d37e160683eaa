"""A ratchet on the size of the product: `python -m tests.counts --rooms` prints the table that tests/counts.csv keeps.

A change that raises a row lowers another, or edits the table and says in its commit why. A change that lowers one
writes the table again, so that what was won is kept.
"""

import csv

import pytest

from tests.counts import COLUMNS, HOUSE, TABLE, rooms

# How far a row may lie below the table before the table has to follow, as a share of it.
SLACK = 0.02


@pytest.fixture(scope="module")
def table():
    with TABLE.open(encoding="utf-8") as file:
        return {row.pop("room"): {name: int(value) for name, value in row.items()} for row in csv.DictReader(file)}


def test_no_room_grows_and_what_shrinks_is_kept(table):
    found = rooms(HOUSE)
    assert found.keys() == table.keys(), "rooms came or went: write tests/counts.csv again"
    grown = [
        f"{room}: {found[room][name]:,} {name}, {row[name]:,} in the table"
        for room, row in table.items()
        for name in COLUMNS
        if found[room][name] > row[name]
    ]
    assert not grown, "look for what can go, or raise tests/counts.csv and say why:\n" + "\n".join(grown)
    shrunk = [room for room, row in table.items() if found[room]["code"] < (1 - SLACK) * row["code"] - 5]
    assert not shrunk, f"{', '.join(shrunk)} shrank: python -m tests.counts --rooms > tests/counts.csv"

"""Docstrings of verbs, read for the help of their commands."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Documentation:
    """A docstring's paragraphs, the command line that it shows, and its entries of parameters by name.

    Under python -OO there are none, and the help is bare.
    """

    text: str
    example: str
    entries: dict[str, str]


@cache
def documentation(verb: Callable[..., Any]) -> Documentation:
    """The docstring of a verb, in Google's form, with its examples as one indented paragraph."""
    body, _, rest = (inspect.getdoc(verb) or "").partition("\nArgs:\n")
    paragraphs = body.partition("\nRaises:\n")[0].strip().split("\n\n")
    examples = [line.strip() for each in paragraphs if each.startswith("    ") for line in each.splitlines()]
    entries = {
        name: " ".join(text.split())
        for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", rest.partition("\n\n")[0], re.MULTILINE)
        for name in names.split(", ")
    }
    text = "\n\n".join(each for each in paragraphs if not each.startswith("    "))
    example = next((line for line in examples if line.startswith("diffquant ")), "diffquant --help")
    return Documentation(text, example, entries)

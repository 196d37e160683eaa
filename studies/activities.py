"""A small classification task out of the HellaSwag items that ship: which activity does a sentence describe?

    python -m studies.activities -o activities
    diffquant sweep MODEL -o order --task shot-order:24 --train activities/train.jsonl --test activities/test.jsonl

The contexts of the eight activities with the most items: the first items of each, in the order of the file, are
demonstrations, the others are asked for.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from diffquant.data import hellaswag_lines
from diffquant.support.files import write_atomically

_ACTIVITIES, _SHOWN = 8, 4


def main(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the two files go.")],
) -> None:
    """Write train.jsonl and test.jsonl, a text and its label in a line."""
    texts_by_activity: dict[str, list[str]] = defaultdict(list)
    for line in hellaswag_lines():
        item = json.loads(line)
        texts_by_activity[item["activity_label"]].append(item["ctx_a"])
    largest = sorted(texts_by_activity, key=lambda activity: (-len(texts_by_activity[activity]), activity))
    output.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", slice(_SHOWN)), ("test", slice(_SHOWN, None))):
        lines = [
            json.dumps({"text": text, "label": activity})
            for activity in largest[:_ACTIVITIES]
            for text in texts_by_activity[activity][part]
        ]
        write_atomically(output / f"{name}.jsonl", "\n".join(lines) + "\n")


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)

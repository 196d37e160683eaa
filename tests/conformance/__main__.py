"""`python -m tests.conformance`: whoever computes the op here, held to its test vectors."""

from typing import Annotated

import typer

from diffquant.errors import ToleranceError
from diffquant.reports.tables import align_columns
from tests.conformance.implementations import IMPLEMENTATIONS, judge
from tests.conformance.vectors import FILE, make_vectors, read_vectors, write_vectors


def main(
    write: Annotated[bool, typer.Option("--write", help="Make the vectors anew by the formula, and stop.")] = False,
) -> None:
    """Run the op's test vectors on every implementation, and print the largest difference of each output."""
    if write:
        write_vectors(make_vectors())
        print(FILE)
        return
    lines, wrong = [], []
    reasons: dict[str, None] = {}
    for vector in read_vectors():
        verdicts = {name: judge(vector, implementation) for name, implementation in IMPLEMENTATIONS.items()}
        lines.append([vector.name, *map(str, verdicts.values())])
        wrong += [f"{name}: {vector.name} {v.note}".rstrip() for name, v in verdicts.items() if not v.passed]
        reasons |= {f"{name}: {v.note}": None for name, v in verdicts.items() if v.error is None}
    print("\n".join(align_columns(["vector", *IMPLEMENTATIONS], lines)))
    print("\n".join(["", "- is not served:", *reasons]) if reasons else "")
    if wrong:
        raise ToleranceError("wrong: " + "; ".join(wrong))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)

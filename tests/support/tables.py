"""Tables of cases that take milliseconds each: one test runs a whole table."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def in_one_test(
    names: str | Sequence[str], cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for every case, as `pytest.mark.parametrize` does, but as one test, which names the case that fails.

    Each case has a folder and patches of its own. Other fixtures are set up once, for all cases.

    Args:
        names: parameters of the test, as a sequence, or as text with commas between them.
        cases: a value for each name; of a single name that is given as text, the value itself.
    """
    alone = isinstance(names, str) and "," not in names
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [(case,) if alone else tuple(case) for case in cases]
    assert rows

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            for number, row in enumerate(rows):
                case = dict(zip(columns, row, strict=True))
                try:
                    _run(test, fixtures, case, number)
                except BaseException as error:
                    error.add_note(f"in case {number}: {case}")
                    raise

        kept = [each for name, each in inspect.signature(test).parameters.items() if name not in columns]
        run_all.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return run_all

    return decorate


def _run(test: Callable[..., None], fixtures: dict[str, Any], case: dict[str, Any], number: int) -> None:
    given = dict(fixtures)
    if "tmp_path" in given:
        given["tmp_path"] = given["tmp_path"] / str(number)
        given["tmp_path"].mkdir()
    if "monkeypatch" not in given:
        test(**given, **case)
        return
    with given["monkeypatch"].context() as given["monkeypatch"]:
        test(**given, **case)

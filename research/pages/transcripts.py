"""Commands and what they printed, recorded by `python -m research.studies.transcripts`."""

from research.pages.raw import raw

RECORDED = {each["command"].partition("  #")[0].rstrip(): each for each in raw("transcripts.json")["transcripts"]}


def shown(*verbs: str) -> str:
    """Commands behind a "$", each with its output, found by how they begin."""
    found = [
        next(each for command, each in RECORDED.items() if command.startswith(f"diffquant {verb}")) for verb in verbs
    ]
    return "\n".join(line for each in found for line in (f"$ {each['command']}", *each["output"]))


def command(begin: str) -> str:
    """A command, found by how it begins."""
    return next(command for command in RECORDED if command.startswith(f"diffquant {begin}"))


def output(begin: str, first: int | None = None) -> str:
    """Lines that a command printed, or the first of them."""
    lines: list[str] = RECORDED[command(begin)]["output"]
    return "\n".join(lines[:first])

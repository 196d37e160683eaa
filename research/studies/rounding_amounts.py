"""Roundings that read a text, each on as much as its maker advises, and on equal amounts.

    python -m research.studies.rounding_amounts $EARLIER/prose-* --books BOOKS --further MANUAL -o OUT

The protocol, written on 30 November 2026 before the first run.

Question: does `tuned`, on the 16,384 tokens that diffquant reads by default, still lose less than AutoRound and
llm-compressor's GPTQ once those read what their makers advise? AutoRound's defaults are 128 samples of 2,048 tokens
(262,144), 200 iterations of 8 samples; llm-compressor's guides read 512 x 2,048 (1,048,576).

Models: the Transformer, DIFF V1 and DIFF V2 of 1.25 M parameters of `research.studies.rounding`. Their context in
training was 256 tokens, so everything is read in windows of 256: each amount is kept in tokens, 128 x 2,048 being
1,024 x 256. AutoRound is run twice on it: with its 8 windows a step, and with 64, which are as many tokens a step as 8
samples of 2,048.

Text: all methods read the beginning of one text, and nothing else differs between the amounts: pieces of 4,096
characters from 1,024 places, evenly spaced over the books that follow the first 24 million characters (on which the
models were trained), in an order drawn with seed 0. BOOKS is the text of diffquant/data/pocket/README.md's English
models. The bundled text is not read, since its other half is scored.

Scores, of 65,536 characters each: prose (the bundled text's second half), elsewhere (HellaSwag's contexts) and further,
a text of another kind: MANUAL, Python 3.11's language reference, which is `pydoc_data.topics.topics.values()` joined by
empty lines. KL in nats from the 16-bit model over windows of 256, and its differences over the same windows with
Student's 95 % interval, uncorrected. A method leads in a cell if the interval lies below zero, and loses if above.

Comparisons: 1. `tuned` at its default amount and AutoRound at its own, 64 windows a step. 2. Both at 262,144.
3. `gptq` at its default amount and llm-compressor's GPTQ, mse scales, at 1,048,576. 4. Both at 262,144. 5. `tuned` and
`gptq` at 262,144 and at their default: if the longer text has less KL on all three texts of all three models, the
default is too short for the least loss, and the page says so.

All at 4 bits, groups of 32, one seed each (five seeds of `tuned` and of AutoRound are in `rounding_repeats`), one
thread. Not run: other widths, the makers' own texts (pile-10k, ultrachat), which are not at hand, and windows of 2,048.

Added on 30 November 2026, after comparisons 2, 4 and 5 and AutoRound with 8 windows a step, before all else. The
default of 16,384 tokens had turned out too short; 65,536 were tried once (`tuned`, DIFF V1, 4.5 bits: 0.0082, 0.0096
and 0.0143). `tuned` and `gptq` are run on 65,536 tokens, `tuned` and AutoRound also at 4.125 bits (groups of 128) and
3.5 (3 bits, groups of 32). In each cell of model, text and width `tuned` on 65,536 tokens is compared with AutoRound
on 262,144, at 4.5 bits with the number of windows a step that has less KL there. If the intervals have `tuned` leading
in more of the nine cells of 4.5 bits than losing, 65,536 becomes its default, and the page says so of every width, won
or lost.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from diffquant.checkpoints.texts import load_text
from diffquant.support.progress import progress_for
from research.studies.quantizers import ours
from research.studies.rounded_model import RoundingOptions
from research.studies.rounding import measure_methods
from research.studies.rounding_method import TIERS, Method, Over
from research.studies.text_quantizers import auto_round, llm_compressor

# Tokens that are read by default: ours, those proposed, AutoRound's, and those of llm-compressor's guides.
OURS, MORE, AUTO_ROUND, LLM_COMPRESSOR = 16384, 65536, 128 * 2048, 512 * 2048
WINDOW = 256
_TRAINED_ON, _PIECE, _PIECES = 24_000_000, 4096, 1024


@dataclass(frozen=True)
class _Contestant:
    name: str
    over: Over
    amounts: tuple[int, ...]
    package: str | None = None


# As many windows of 256 a step as have the tokens of AutoRound's 8 samples.
LONG_STEPS = "AutoRound, 64 windows a step"
_CONTESTANTS = (
    _Contestant("tuned", ours("tuned", 4, 32), (OURS, MORE, AUTO_ROUND)),
    _Contestant("gptq", ours("gptq", 4, 32), (OURS, MORE, AUTO_ROUND)),
    _Contestant("AutoRound", auto_round(4, 32), (OURS, AUTO_ROUND), "auto-round"),
    _Contestant(
        "llm-compressor GPTQ",
        llm_compressor(4, 32, "memoryless_mse"),
        (OURS, AUTO_ROUND, LLM_COMPRESSOR),
        "llmcompressor",
    ),
    _Contestant("tuned 4:g128", ours("tuned", 4, 128), (MORE,)),
    _Contestant("AutoRound 4:g128", auto_round(4, 128), (AUTO_ROUND,), "auto-round"),
    _Contestant("tuned 3:g32", ours("tuned", 3, 32), (MORE,)),
    _Contestant("AutoRound 3:g32", auto_round(3, 32), (AUTO_ROUND,), "auto-round"),
    _Contestant(LONG_STEPS, auto_round(4, 32, batch_size=64), (AUTO_ROUND,), "auto-round"),
)


def name_of(method: str, tokens: int) -> str:
    """Name of a method's row on an amount of text."""
    return f"{method}, {tokens:,} tokens"


def _reading(over: Over, tokens: int) -> Over:
    return lambda reading: over(reading.shortened(tokens))


METHODS = tuple(
    Method(name_of(each.name, tokens), TIERS[0], _reading(each.over, tokens), each.package)
    for each in _CONTESTANTS
    for tokens in each.amounts
)


def cut_pieces(books: str) -> str:
    """Pieces of the books behind those that the models were trained on, from places evenly spaced, in a drawn order."""
    step = (len(books) - _TRAINED_ON) // _PIECES
    places = [_TRAINED_ON + step * number for number in range(_PIECES)]
    random.Random(0).shuffle(places)
    return "".join(books[place : place + _PIECE] for place in places)


def main(
    paths: Annotated[list[Path], typer.Argument(help="Checkpoint folders.")],
    books: Annotated[Path, typer.Option(help="Text of the books.")],
    further: Annotated[Path, typer.Option(help="A third text to score.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of a file a model.")],
    only: Annotated[str, typer.Option(help="Part of methods' names; all by default.")] = "",
) -> None:
    """Measure roundings on the amounts of text that their makers advise."""
    chosen = [method for method in METHODS if only in method.name]
    with TemporaryDirectory() as folder:
        read = Path(folder, "read.txt")
        read.write_text(cut_pieces(load_text(books)), encoding="utf-8")
        options = RoundingOptions(None, 65536, WINDOW, LLM_COMPRESSOR, 0, read, further)
        for path in paths:
            measure_methods(path, options, chosen, output / f"{path.name}.json", progress_for(path.name))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)

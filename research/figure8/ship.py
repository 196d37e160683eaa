"""Make a model that ships of a run: its weights in 16 bits, its tokenizer, and how it was trained.

    python -m research.figure8.ship e1-diff-v1-seed-101 --raw RAW --output diffquant/data/pocket/prose-diff-v1

Runs keep no weights that git has, so the run is trained again, into raw files of its own:

    mkdir RAW && cp research/figure8/results/e1-*-rate-* RAW                       # these decide its rate
    python -m research.figure8.run e1-diff-v1-seed-101 --text FILE --output RAW    # leaves build/figure8/NAME/model

What is printed says how near the new training comes to the one whose raw file is committed.
"""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer

from diffquant.errors import OutputExistsError, UsageError
from diffquant.model.modeling import DiffTransformer
from diffquant.support.files import write_atomically, write_json
from research.figure8.comparisons import PRIMARY
from research.figure8.plan import RESULTS, SIZES, Result, Run, listed, results
from research.figure8.run import BUILD
from research.train.loop import LOG
from research.train.train import RUN

# What a folder keeps of its training's raw file; of the scores it has these schemes' KL, in nats.
_KEPT = ("run", "kind", "parameters", "arithmetic", "training_text", "weights", "validation", "environment")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_SCHEMES = (PRIMARY, "4:row:shift")
# What transformers notes of the place that the run's tokenizer was read from.
_WHERE = ("is_local", "local_files_only")


def main(
    name: Annotated[str, typer.Argument(help="Run of runs.md that was trained here.")],
    raw: Annotated[Path, typer.Option(help="Folder of the raw file that the training here wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist.")],
) -> None:
    """Write the folder of a model that ships."""
    there, committed = results(raw), results(RESULTS)
    if name not in there or name not in committed:
        raise UsageError(
            f"{raw if name in committed else RESULTS} has no raw file of {name}; research.figure8.run makes it"
        )
    (run,) = (run for run in listed() if run.name == name)
    ship(run, there[name], BUILD / name, output)
    print(likeness(there[name], committed[name]))


def ship(run: Run, trained: Result, folder: Path, output: Path) -> None:
    """Write the model of a run's folder in bfloat16, with the run's log and how it was trained.

    Args:
        trained: raw file of the training.
        folder: where the training left its log and the model.
        output: folder to write.

    Raises:
        OutputExistsError: the output exists.
    """
    if output.exists():
        raise OutputExistsError(f"{output} exists; remove it, or choose another output")
    model = DiffTransformer.from_pretrained(folder / "model", dtype=torch.bfloat16)
    model.save_pretrained(output)
    # Saved for `generate`, which reads the same from config.json.
    (output / "generation_config.json").unlink(missing_ok=True)
    for file in _TOKENIZER:
        content = json.loads((folder / "model" / file).read_text(encoding="utf-8"))
        for where in _WHERE:
            content.pop(where, None)
        # Indented, a vocabulary of 2,048 takes more than twice the room.
        write_atomically(output / file, json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    write_atomically(output / LOG, (folder / LOG).read_bytes())
    books = {"nll": fmean(trained["books"]["nll"]), "kl": {s: fmean(trained["books"]["kl"][s]) for s in _SCHEMES}}
    settings = {"model": asdict(SIZES[run.size]), "schedule": asdict(run.schedule(trained["rate"]))}
    write_json(output / RUN, {key: trained[key] for key in _KEPT} | {"books": books} | settings)


def likeness(trained: Result, committed: Result) -> str:
    """How near a training comes to the committed one of its run: in weights, losses and scores."""
    if trained["weights"] == committed["weights"]:
        return f"{committed['run']}: the weights of the committed raw file, to the bit"
    losses = max(abs(loss - trained["losses"][step]) for step, loss in committed["losses"].items())
    perplexities = (f"{each['validation']['perplexity']:.6g}" for each in (trained, committed))
    costs = (f"{fmean(each['books']['kl'][PRIMARY]):.6g}" for each in (trained, committed))
    return (
        f"{committed['run']}: other weights than the committed raw file's; losses of 100 steps differ by {losses:.2g} "
        f"at most, perplexity is {' instead of '.join(perplexities)}, KL at {PRIMARY} {' instead of '.join(costs)}"
    )


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)

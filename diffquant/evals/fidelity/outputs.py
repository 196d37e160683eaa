"""The files of a comparison: numbers, a table for the model card, and an entry that the hub reads."""

import re
from pathlib import Path

import yaml

from diffquant.evals.fidelity.result import Fidelity
from diffquant.support.files import write_atomically
from diffquant.support.outputs import RunFiles

NUMBERS, CARD, README = "fidelity.json", "fidelity.md", "README.md"
# An earlier table on a card, as far as the next heading of its level.
_SECTION = re.compile(r"^## Fidelity\n.*?(?=^##? |\Z)", re.MULTILINE | re.DOTALL)
# Where the hub looks for evaluations of a model.
HUB = Path(".eval_results/fidelity.yaml")
FILES = RunFiles(NUMBERS, frozenset({"reference", "candidate", "kl", "same_top_token"}), (CARD, str(HUB)), True)


def put_on_card(result: Fidelity, model: Path, dataset: str | None) -> list[Path]:
    """Put the table onto a folder's model card, in place of an earlier one, and an entry beside it that the hub reads.

    Args:
        model: folder of the candidate, with its card.
        dataset: as `write_fidelity` takes it.
    """
    card = model / README
    kept = _SECTION.sub("", card.read_text(encoding="utf-8")).rstrip("\n") if card.is_file() else f"# {model.name}"
    write_atomically(card, f"{kept}\n\n{result.card()}")
    return [card, *([_write_for_hub(result, model, dataset)] if dataset else [])]


def _write_for_hub(result: Fidelity, folder: Path, dataset: str) -> Path:
    text = yaml.safe_dump(result.hub_entries(dataset), sort_keys=False, allow_unicode=True)
    (folder / HUB).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / HUB, text)
    return folder / HUB


def write_fidelity(result: Fidelity, folder: Path, dataset: str | None) -> list[Path]:
    """Write the files; the hub's only where the text's dataset is named, which an entry must have.

    Args:
        dataset: ORG/NAME of the text's dataset on the hub, or None.
    """
    texts = {NUMBERS: result.to_json(), CARD: result.card()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return [*(folder / name for name in texts), *([_write_for_hub(result, folder, dataset)] if dataset else [])]

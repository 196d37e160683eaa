"""The files of a comparison: numbers, a table for the model card, and an entry that the hub reads."""

import re
from pathlib import Path

import yaml

from diffquant.evals.fidelity.result import HUB_NOTES, Fidelity
from diffquant.formats.atomic_folder import add_to_record
from diffquant.support.files import check_writable, write_atomically
from diffquant.support.outputs import RunFiles, check_written_file

NUMBERS, CARD, README = "fidelity.json", "fidelity.md", "README.md"
# An earlier table on a card, as far as the next heading of its level.
_SECTION = re.compile(r"^## Fidelity\n.*?(?=^##? |\Z)", re.MULTILINE | re.DOTALL)
# Where the hub looks for evaluations of a model.
HUB = Path(".eval_results/fidelity.yaml")
FILES = RunFiles(NUMBERS, frozenset({"reference", "candidate", "kl", "same_top_token"}), (CARD, str(HUB)), True)


def check_card(model: Path, dataset: str | None) -> None:
    """Check before the work that a card and its entry can be written, and that an older entry is of a comparison.

    Raises:
        OutputExistsError: something else wrote the entry.
        UsageError: nothing can be written there.
    """
    check_writable(model)
    entry = model / HUB
    if dataset:
        check_written_file(entry, is_own=entry.is_file() and HUB_NOTES.encode() in entry.read_bytes())


def put_on_card(result: Fidelity, model: Path, dataset: str | None) -> list[Path]:
    """Put the table onto a folder's model card, in place of an earlier one, and an entry beside it that the hub reads.

    Args:
        model: folder of the candidate, with its card.
        dataset: as `write_fidelity` takes it.
    """
    card, is_new = model / README, not (model / README).exists()
    kept = f"# {model.name}" if is_new else _SECTION.sub("", card.read_text(encoding="utf-8")).rstrip("\n")
    write_atomically(card, f"{kept}\n\n{result.card()}")
    entry = _write_for_hub(result, model, dataset)
    # A card that was there may be a stranger's.
    add_to_record(model, [*([card] if is_new else []), *entry])
    return [card, *entry]


def _write_for_hub(result: Fidelity, folder: Path, dataset: str | None) -> list[Path]:
    if dataset is None:
        return []
    text = yaml.safe_dump(result.hub_entries(dataset), sort_keys=False, allow_unicode=True)
    (folder / HUB).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / HUB, text)
    return [folder / HUB]


def write_fidelity(result: Fidelity, folder: Path, dataset: str | None) -> list[Path]:
    """Write the files; the hub's only where the text's dataset is named, which an entry must have.

    Args:
        dataset: ORG/NAME of the text's dataset on the hub, or None.
    """
    texts = {NUMBERS: result.to_json(), CARD: result.card()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    written = [*(folder / name for name in texts), *_write_for_hub(result, folder, dataset)]
    add_to_record(folder, written)
    return written

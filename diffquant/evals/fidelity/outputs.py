"""The files of a comparison: numbers, a table for the model card, and an entry that the hub reads."""

from pathlib import Path

import yaml

from diffquant.evals.fidelity.result import Fidelity
from diffquant.support.files import write_atomically
from diffquant.support.outputs import RunFiles

NUMBERS, CARD = "fidelity.json", "fidelity.md"
# Where the hub looks for evaluations of a model.
HUB = Path(".eval_results/fidelity.yaml")
FILES = RunFiles(NUMBERS, frozenset({"reference", "candidate", "kl", "same_top_token"}), (CARD, str(HUB)))


def write_fidelity(result: Fidelity, folder: Path, dataset: str | None) -> list[Path]:
    """Write the files; the hub's only where the text's dataset is named, which an entry must have.

    Args:
        dataset: ORG/NAME of the text's dataset on the hub, or None.
    """
    texts = {NUMBERS: result.to_json(), CARD: result.card()}
    if dataset is not None:
        texts[str(HUB)] = yaml.safe_dump(result.hub_entries(dataset), sort_keys=False, allow_unicode=True)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, text)
    return [folder / name for name in texts]

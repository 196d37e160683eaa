"""Exported folders that the tests of the page share."""

import shutil
from pathlib import Path

import pytest

import diffquant.data
from diffquant.onnx import ExportOptions, export
from tests.support.checkpoints import write_checkpoint

POCKET = Path(diffquant.data.__file__).parent / "pocket"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders by the name of their source, each written when it is first asked for."""
    root = tmp_path_factory.mktemp("web")
    written = {}

    def folder(source):
        if source not in written:
            pocket = POCKET / source
            if pocket.is_dir():
                # Runtimes round activations in their own ways; codes of 4 bits alone are multiplied with float32 ones.
                options = ExportOptions.parse("4:row", embed_bits=8, accuracy_level=1, web=True)
                export(pocket, root / source, options)
            else:
                export(write_checkpoint(root / f"{source}-checkpoint", source), root / source, ExportOptions(web=True))
                # A model of random weights has no tokenizer, and the page opens one.
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    shutil.copy(POCKET / "needle-diff-v2" / name, root / source / name)
            written[source] = root / source
        return written[source]

    return folder

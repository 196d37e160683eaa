"""Which tokens begin, end and pad what a model writes. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.formats.json_object import read_json

_FILE = "generation_config.json"


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens that stand around a text.

    Attributes:
        bos: token that begins a text; None if there is none.
        ends: tokens that end a text: generation stops at the first of them.
        pad: token that fills a batch; None if there is none.
    """

    bos: int | None
    ends: tuple[int, ...]
    pad: int | None

    @property
    def eos(self) -> int | list[int] | None:
        """The ends as transformers' configurations have them."""
        return list(self.ends) if len(self.ends) > 1 else next(iter(self.ends), None)


def read_special_tokens(path: Path, config: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens that transformers' `generate` goes by.

    They stand in generation_config.json, and where that file is, config.json's do not count. Of the other settings in
    that file, which sample or penalize, none is taken: text is decoded greedily unless the caller says otherwise.

    Args:
        path: folder of a checkpoint or an export, or a .gguf file.
        config: content of its config.json.

    Raises:
        CheckpointError: the file cannot be read, or what stands there are no token ids.
    """
    file = path / _FILE
    origin, entries = (file, read_json(file)) if file.is_file() else (path / "config.json", config)
    bos, eos, pad = (entries.get(f"{name}_token_id") for name in ("bos", "eos", "pad"))
    ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
    wrong = [f"eos_token_id is {eos!r}"] if not all(type(token) is int for token in ends) else []
    wrong += [
        f"{name}_token_id is {token!r}"
        for name, token in (("bos", bos), ("pad", pad))
        if token is not None and type(token) is not int
    ]
    if wrong:
        raise CheckpointError(f"{origin}: {', '.join(wrong)}, which is not a token id")
    return SpecialTokens(bos, tuple(ends), pad)

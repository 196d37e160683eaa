"""The tokenizer in a GGUF file, which splits text and begins it as llama.cpp does.

transformers reads vocabulary and merges; how text is split before merging it knows for some of the names that
`tokenizer.ggml.pre` may have, and splits as GPT-2 for the others. What else llama.cpp does by that name is done here,
and the space that it puts before the text of a SentencePiece vocabulary, also where there is one.

Source: llama.cpp, src/llama-vocab.cpp, llama_vocab::impl::load and llm_tokenizer_bpe.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffquant.errors import CheckpointError
from diffquant.formats.gguf_header import Value, read_header

# Vocabularies that begin a text with BOS unless the file says otherwise, and take a word that they hold whole.
_LIKE_LLAMA_3 = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
}  # fmt: skip
# Those that split as GPT-2 does once each digit is on its own, and those that split as GPT-2 does.
_BY_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_LIKE_GPT_2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}
_GPT_2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPACE = "\u2581"
_DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file.

    Raises:
        CheckpointError: it splits text in a way that is not known here.
        Exception: whatever transformers raises where it cannot be read.
    """
    from transformers import AutoTokenizer

    metadata = read_header(np.memmap(path, np.uint8, mode="r").data).metadata
    # Without trust_remote_code, transformers asks on stdin whether to run the checkpoint's code.
    tokenizer = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
    )
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        _split_as_llama_cpp(tokenizer, metadata)
    elif kind == "llama":
        _prefix_as_llama_cpp(tokenizer.backend_tokenizer, bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    return tokenizer


def _prefix_as_llama_cpp(backend: Any, has_prefix: bool) -> None:
    from tokenizers import decoders, normalizers

    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    backend.pre_tokenizer = None
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(parts)


def _split_as_llama_cpp(tokenizer: Any, metadata: Mapping[str, Value]) -> None:
    from tokenizers import Regex, pre_tokenizers

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:  # an older transformers, which splits as GPT-2 whatever the file says
        known = {}
    kind = metadata.get("tokenizer.ggml.pre", "default")
    backend = tokenizer.backend_tokenizer
    if kind in _LIKE_LLAMA_3:
        backend.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in metadata:
            tokenizer.add_bos_token = True
    if kind in _BY_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif kind == "default":
        splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _DEFAULT_SPLITS]
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, plain])
    elif kind not in known and kind not in _LIKE_GPT_2:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {kind!r}, and how it splits text is not known here; upgrade transformers, or put "
            "the tokenizer that the model was made with into the converted folder"
        )

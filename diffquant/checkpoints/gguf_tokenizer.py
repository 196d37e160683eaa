"""Loads the tokenizer in a GGUF file so that it splits and begins text as llama.cpp does.

transformers reads vocabulary and merges. It splits text before merging correctly for only some values of
`tokenizer.ggml.pre`, and like GPT-2 for the others. This module makes every value split as in llama.cpp. It also puts a
space before text for a SentencePiece vocabulary, even if the text begins with a space.

Source: llama.cpp, src/llama-vocab.cpp, llama_vocab::impl::load and llm_tokenizer_bpe.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from diffquant.checkpoints.gguf_header import Value, read_header
from diffquant.errors import CheckpointError

# Values of `tokenizer.ggml.pre` with which a text begins with BOS unless the file says otherwise, and a word that is in
# the vocabulary becomes one token.
_LIKE_LLAMA_3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
)  # fmt: skip
# Values that split off every digit and then split as GPT-2 does, and values that only split as GPT-2 does.
_BY_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LIKE_GPT_2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
_GPT_2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# The best-known value for each way of splitting.
_WRITTEN = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "qwen35", "default")
SPACE = "\u2581"
_DIGITS = "each digit"
_DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")


def load_gguf_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a GGUF file.

    Raises:
        CheckpointError: diffquant does not support how this tokenizer splits text.
        Exception: transformers cannot read the tokenizer, and raises an exception of any type.
    """
    from transformers import AutoTokenizer

    metadata = read_header(np.memmap(path, np.uint8, mode="r").data)[0]
    # Without trust_remote_code, transformers asks on stdin whether to run the checkpoint's code.
    tokenizer = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
    )
    kind = metadata.get("tokenizer.ggml.model")
    _remove_defaults(tokenizer, cast(int, metadata["tokenizer.ggml.tokens"]))
    if kind == "gpt2":
        _split_as_llama_cpp(tokenizer, metadata)
    elif kind == "llama":
        _prefix_as_llama_cpp(tokenizer.backend_tokenizer, bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    return tokenizer


def _remove_defaults(tokenizer: Any, count: int) -> None:
    """Remove tokens such as GPT-2's <|endoftext|> that transformers adds to a vocabulary of `count` tokens."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = [token for token in content["added_tokens"] if token["id"] < count]
    if kept != content["added_tokens"]:
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(content | {"added_tokens": kept}))


def _prefix_as_llama_cpp(backend: Any, has_prefix: bool) -> None:
    from tokenizers import decoders, normalizers

    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    backend.pre_tokenizer = None
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(parts)


def _split_as_llama_cpp(tokenizer: Any, metadata: Mapping[str, Value]) -> None:
    from tokenizers import Regex, pre_tokenizers

    kind = metadata.get("tokenizer.ggml.pre", "default")
    backend, splits = tokenizer.backend_tokenizer, _splits().get(str(kind))
    if splits is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {kind!r}, whose text splitting is unknown; upgrade transformers, or copy "
            "the model's original tokenizer into the converted folder"
        )
    if kind in _LIKE_LLAMA_3:
        backend.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in metadata:
            tokenizer.add_bos_token = True
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if split == _DIGITS
        else pre_tokenizers.Split(Regex(split), "isolated")
        for split in splits
    ]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, plain])


def _splits() -> dict[str, tuple[str, ...]]:
    """Return the expressions that llama.cpp applies in turn to split text before merging, by `tokenizer.ggml.pre`."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:  # an older transformers
        known = {}
    return {
        **dict.fromkeys(_LIKE_GPT_2, (_GPT_2_SPLIT,)),
        **dict.fromkeys(_BY_DIGITS, (_DIGITS, _GPT_2_SPLIT)),
        **{kind: (split,) for kind, split in known.items()},
        "default": _DEFAULT_SPLITS,
    }


def find_pretokenizer(tokenizer: Mapping[str, Any]) -> str | None:
    """Return the value of `tokenizer.ggml.pre` with which llama.cpp splits text as a tokenizer does, or None.

    Args:
        tokenizer: content of tokenizer.json.
    """
    before = tokenizer["pre_tokenizer"] or {}
    steps = tuple(_expression(step) for step in before.get("pretokenizers", [before]))
    found, takes_words = tuple(filter(None, steps)), bool(tokenizer["model"].get("ignore_merges"))
    known = _splits()
    kinds = (kind for kind in _WRITTEN if known.get(kind) == found and (kind in _LIKE_LLAMA_3) == takes_words)
    # The last step has to map bytes to letters.
    return next(kinds, None) if steps and steps[-1] in ("", _GPT_2_SPLIT) else None


def _expression(step: Mapping[str, Any]) -> str:
    """Return the expression that a step splits by; "" if it only maps bytes to letters."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return _GPT_2_SPLIT if step.get("use_regex", True) else ""
        case {"type": "Digits", "individual_digits": True}:
            return _DIGITS
        case {"type": "Split", "pattern": {"Regex": str(split)}, "behavior": "Isolated", "invert": False}:
            return split
    return str(step)


_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# Code-completion tokens that end a text: known texts of each. A file may state another token.
_OF_CODE = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Texts of tokens to look for in a vocabulary.
ENDS = (*_ENDS, *(name for names in _OF_CODE.values() for name in names))


def make_eos_token_id(metadata: Mapping[str, Value], ids: Mapping[str, int]) -> Any:
    """Return `eos_token_id` for config.json: a list of the tokens that end a text, the only such token, or None.

    Args:
        metadata: metadata of the file.
        ids: id of each token of `ENDS` that is in the vocabulary.
    """
    stated = [_stated_token(metadata, kind) for kind in ("eos", "eot", "eom")]
    named = {text for text in _ENDS if text in ids}
    left_out = set()
    if {"<|return|>", "<|flush|>"} & named and {"<|call|>", "<|calls|>"} & named:
        # In such vocabularies <|end|> ends only one of several parts of an answer.
        left_out.add("<|end|>")
    if "<|tool_response>" in named:
        left_out.add("</s>")
    of_code: list[int] = []
    for kind, names in _OF_CODE.items():
        known = sorted(ids[name] for name in names if name in ids)
        token = _stated_token(metadata, kind)
        of_code += known[:1] if token is None else [token]
    found = [*stated, *sorted(ids[text] for text in named), *of_code]
    not_ends = {None, *(ids[text] for text in left_out & named)}
    ends = [token for token in dict.fromkeys(found) if token not in not_ends]
    return ends if len(ends) > 1 else next(iter(ends), None)


def _stated_token(metadata: Mapping[str, Value], kind: str) -> Any:
    return metadata.get(f"tokenizer.ggml.{kind}_token_id")

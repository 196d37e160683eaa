"""The tokens that end a text in a GGUF file: those at which llama.cpp stops.

A file states one or a few, and llama.cpp adds what its vocabulary has of the names that models give to such tokens: a
chat ends its turns with another token than the one that a file states for texts.

Source: llama.cpp, src/llama-vocab.cpp, llama_vocab::impl::load, special_eog_ids.
"""

from typing import Any

from diffquant.formats.gguf_header import Header

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# The tokens of code completion that end one: names of each, of which a file may state another.
_OF_CODE = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Texts of tokens to look for in a vocabulary.
ENDS = (*_ENDS, *(name for names in _OF_CODE.values() for name in names))


def end_tokens(header: Header) -> Any:
    """The tokens that end a text as config.json has them: a list, or one; None where the file has none.

    Args:
        header: header that was read with `ENDS`.
    """
    ids = header.ids
    stated = [_stated(header, kind) for kind in ("eos", "eot", "eom")]
    named = {text for text in _ENDS if text in ids}
    left_out = set()
    if {"<|return|>", "<|flush|>"} & named and {"<|call|>", "<|calls|>"} & named:
        # There it ends one of several parts of an answer.
        left_out.add("<|end|>")
    if "<|tool_response>" in named:
        left_out.add("</s>")
    of_code: list[int] = []
    for kind, names in _OF_CODE.items():
        known = sorted(ids[name] for name in names if name in ids)
        token = _stated(header, kind)
        of_code += known[:1] if token is None else [token]
    found = [*stated, *sorted(ids[text] for text in named), *of_code]
    not_ends = {None, *(ids[text] for text in left_out & named)}
    ends = [token for token in dict.fromkeys(found) if token not in not_ends]
    return ends if len(ends) > 1 else next(iter(ends), None)


def _stated(header: Header, kind: str) -> Any:
    return header.metadata.get(f"tokenizer.ggml.{kind}_token_id")

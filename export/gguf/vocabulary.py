"""Export of a checkpoint's tokenizer to the metadata of a GGUF file.

Source: llama.cpp, src/llama-vocab.cpp, and its conversion of Hugging Face folders.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from gguf import GGUFWriter, TokenType

from diffquant.checkpoints.gguf_tokenizer import ENDS, SPACE, find_pretokenizer
from diffquant.checkpoints.source import Source
from diffquant.errors import CheckpointError
from diffquant.support.names import first_few

# Roles of end tokens; a GGUF file can have one token for each.
_END_ROLES = ("eos", "eot", "eom")


def add_vocabulary(writer: GGUFWriter, source: Source, rows: int) -> list[str]:
    """Add a checkpoint's tokens, merges, special tokens and chat template to a GGUF file's metadata.

    Args:
        rows: number of rows of the model's embedding; the file needs a token for each row.

    Returns:
        Sentences for the user on tokens that llama.cpp handles differently; empty if there are none.

    Raises:
        CheckpointError: there is no tokenizer, or llama.cpp cannot tokenize text the same way; the message says why.
    """
    tokenizer = source.tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise _refusal(source, f"{type(tokenizer).__name__} has no tokenizer.json")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, ids, added = content["model"], tokenizer.get_vocab(), content["added_tokens"]
    if model["type"] != "BPE":
        raise _refusal(source, f"it is of type {model['type']}, but only BPE can be written, including SentencePiece's")
    if (largest := max(model["vocab"].values(), default=0)) >= rows:
        raise _refusal(source, f"it has a token {largest}, and the embedding has {rows} rows")
    texts = {number: text for text, number in ids.items() if number < rows}
    kinds = dict.fromkeys((number for number in range(rows) if number not in texts), TokenType.UNUSED)
    for token in added:
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    if model.get("byte_fallback"):
        kinds |= _add_pieces(writer, source, content, rows, ids)
    else:
        _add_bytes(writer, source, content)
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(rows)])
    writer.add_token_types([int(kinds.get(number, TokenType.NORMAL)) for number in range(rows)])
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)
    notes = _add_special(writer, source, texts)
    if beyond := [token["content"] for token in added if token["id"] >= rows]:
        notes.append(f"tokens left out, because the embedding has no row for them: {first_few(beyond, ', ')}")
    if strips := [t["content"] for t in added if t["lstrip"] or t["rstrip"] or t["single_word"]]:
        notes.append(f"llama.cpp does not look at the spaces and words around tokens: {first_few(strips, ', ')}")
    return notes


def _refusal(source: Source, why: str) -> CheckpointError:
    return CheckpointError(f"the tokenizer of {source.path} cannot be written into a GGUF file: {why}")


def _add_bytes(writer: GGUFWriter, source: Source, content: Mapping[str, Any]) -> None:
    """Add the merges of a byte-level BPE, and llama.cpp's name of its pre-tokenizer."""
    model, normalizer, name = content["model"], content["normalizer"], find_pretokenizer(content)
    if name is None:
        what = json.dumps(content["pre_tokenizer"])
        raise _refusal(source, f"llama.cpp has no known pre-tokenizer that splits text by {what:.300}")
    odd = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    # NFC is accepted: llama.cpp does not normalize, and runs models whose tokenizers do.
    if odd or (normalizer and normalizer != {"type": "NFC"}):
        raise _refusal(source, f"llama.cpp has no BPE with {', '.join(odd) or json.dumps(normalizer)[:300]}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])


def _add_pieces(
    writer: GGUFWriter, source: Source, content: Mapping[str, Any], rows: int, ids: Mapping[str, int]
) -> dict[int, TokenType]:
    """Add the scores of SentencePiece's BPE, which merges the pair with the highest score first.

    Returns:
        Types of its byte tokens and its unknown token, by id.
    """
    model, prefix = content["model"], _prefix(content)
    if prefix is None:
        odd = json.dumps({key: content[key] for key in ("normalizer", "pre_tokenizer")})
        raise _refusal(source, f"llama.cpp has no SentencePiece with {odd:.300}")
    scores = [float(-len(model["merges"]))] * rows
    for rank, merge in reversed([*enumerate(model["merges"])]):
        merged = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        scores[ids[merged]] = float(-rank)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(prefix)
    kinds = {number: TokenType.BYTE for text, number in ids.items() if re.fullmatch("<0x[0-9A-F]{2}>", text)}
    unknown = ids.get(model.get("unk_token"))
    return kinds if unknown is None else kinds | {unknown: TokenType.UNKNOWN}


def _prefix(content: Mapping[str, Any]) -> bool | None:
    """Return whether the tokenizer prepends a space to each text, or None if llama.cpp cannot handle its spaces."""
    normalizer, before = content["normalizer"] or {}, content["pre_tokenizer"]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if before is None:
        steps = normalizer.get("normalizers", [normalizer])
        has_prefix = steps[:1] == [{"type": "Prepend", "prepend": SPACE}]
        return has_prefix if steps[has_prefix:] == [spaces] else None
    if normalizer or before["type"] != "Metaspace" or before["replacement"] != SPACE or before.get("split"):
        return None
    return bool(before["prepend_scheme"] != "never")


def _add_special(writer: GGUFWriter, source: Source, texts: Mapping[int, str]) -> list[str]:
    """Add the ids of special tokens, and whether BOS and EOS are added to a text; return notes for the user."""
    tokenizer, stated = source.tokenizer, source.special_tokens
    bos = stated.bos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ends = [token for token in dict.fromkeys(stated.ends or (tokenizer.eos_token_id,)) if token in texts]
    if not ends:
        raise _refusal(source, "it has no token that ends a text, so llama.cpp would use another one")
    ids = dict(zip(_END_ROLES, ends, strict=False))
    ids |= {"bos": bos, "unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}
    for role, token in ids.items():
        if token in texts:
            getattr(writer, f"add_{role}_token_id")(token)
    plain, whole = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (False, True))
    around = [(begins, stops) for begins in (False, True) for stops in (False, True)]
    fits = [(begins, stops) for begins, stops in around if [*[bos] * begins, *plain, *ends[:1] * stops] == whole]
    if not fits:
        raise _refusal(source, "it adds more to a text than one token before and one after it")
    writer.add_add_bos_token(fits[0][0])
    writer.add_add_eos_token(fits[0][1])
    beyond = [texts[token] for token in ends[len(_END_ROLES) :] if texts[token] not in ENDS]
    note = f"left out, since a GGUF file names only three tokens that end a text: {first_few(beyond, ', ')}"
    return [note] if beyond else []

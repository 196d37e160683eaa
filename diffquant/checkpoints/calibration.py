"""Calibration data: text files, JSON lines and datasets, mixed by weight, as sequences of tokens."""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffquant.checkpoints.corpora import Corpus, Row, Sources, open_corpora
from diffquant.checkpoints.texts import check_tokens, text_digest
from diffquant.checkpoints.tokens import check_window, cut_windows, encode_first_tokens, prefix_token
from diffquant.errors import UsageError
from diffquant.support.devices import log_once
from diffquant.support.plain_data import is_encodable_text

# Number of characters in the pieces in which texts are mixed.
_PIECE = 4096
# Number of consecutive tokens that two texts do not share by chance.
_RUN = 16


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration data as sequences of token ids.

    Attributes:
        ids: token ids [N, window], with the sources mixed evenly.
        parts: token ids of each source in order, without an incomplete last sequence.
        record: digest, numbers of samples and tokens, and each source, for diffquant.json.
        is_shuffled: whether rows of a source were shuffled with the seed; false if all sources are plain text files.
    """

    ids: Tensor
    parts: Sequence[Sequence[int]]
    record: dict[str, Any]
    is_shuffled: bool

    @property
    def digest(self) -> str:
        return str(self.record["text"])

    def count_overlap(self, scored: Sequence[Sequence[int]]) -> int:
        """Count the scored tokens in runs of 16 or more that also occur in the calibration data."""
        seen = {tuple(read[i : i + _RUN]) for read in self.parts for i in range(len(read) - _RUN + 1)}
        count = 0
        for tokens in scored:
            begins = [i for i in range(len(tokens) - _RUN + 1) if tuple(tokens[i : i + _RUN]) in seen]
            count += len({place for begin in begins for place in range(begin, begin + _RUN)})
        return count


def read_calibration(
    sources: Sources, tokenizer: Any, config: Any, window: int, tokens: int, seed: int = 0
) -> Calibration:
    """Read calibration data in sequences of `window` tokens.

    A source's documents are joined and cut into sequences; an incomplete last one is dropped. A plain text file is read
    from its beginning.

    Args:
        sources: one or several SOURCE or SOURCE=WEIGHT; by default the bundled text. A SOURCE is a file of plain
            text, a JSONL file of `messages` or `text`, or a dataset: `ORG/NAME[@REVISION][:CONFIG][:SPLIT]` or a path.
        config: the model's configuration.
        tokens: largest number of tokens from all sources together.
        seed: seed of the order of rows.

    Raises:
        DiffQuantError: a source cannot be read or fills no sequence, or the window does not fit the model.
    """
    check_window(window, config, tokenizer, tokens)
    corpora = open_corpora(sources)
    parts: list[Tensor] = []
    records: list[dict[str, Any]] = []
    for corpus, share in zip(corpora, _shares(corpora, tokens // window), strict=True):
        ids, record = _read(corpus, tokenizer, share * window, seed)
        check_tokens(ids, config.vocab_size, tokenizer)
        part = cut_windows(torch.tensor(ids), window, corpus.name)
        if len(part) < share:
            message = "calibration reads %d sequences of %d tokens of %s, which has no more; %d were requested"
            log_once(__name__, logging.WARNING, message, len(part), window, corpus.name, share)
        parts.append(part)
        records.append(record | {"samples": len(part), "tokens": part.numel()})
    mixed = torch.stack(mix_evenly([list(part) for part in parts]))
    digest = combine_digests([each["digest"] for each in records])
    account = {"text": digest, "tokens": mixed.numel(), "window": window, "samples": len(mixed), "sources": records}
    tokens_read = [part.flatten().tolist() for part in parts]
    return Calibration(mixed, tokens_read, account, any(corpus.text is None for corpus in corpora))


def calibration_text(sources: Sources, tokenizer: Any, characters: int) -> str:
    """Return the sources' documents as one text.

    A single plain text file is returned whole. If there is a single source of rows, its first rows are returned, with
    at least `characters` in total if there are as many. If there are several sources, each contributes at most its
    weight's fraction of `characters`.

    Raises:
        DiffQuantError: see `read_calibration`.
    """
    corpora = open_corpora(sources)
    total = sum(corpus.weight for corpus in corpora)
    parts = []
    for corpus in corpora:
        read, length, wanted = list[str](), 0, math.ceil(characters * corpus.weight / total)
        for text, _ in _documents(corpus, tokenizer, 0):
            read.append(text)
            length += len(text)
            if length >= wanted:
                break
        parts.append("\n\n".join(read)[: wanted if len(corpora) > 1 else None])
    pieces = [[text[i : i + _PIECE] for i in range(0, len(text), _PIECE)] for text in parts]
    return "".join(mix_evenly(pieces))


def combine_digests(digests: Sequence[str]) -> str:
    """Combine texts' digests into one of 16 hex digits; a single digest is returned unchanged."""
    return digests[0] if len(digests) == 1 else text_digest("\n".join(digests))


def mix_evenly(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Merge lists into one in which the items of each list are spread evenly, in their order."""
    places = [((k + 0.5) / len(part), i, k) for i, part in enumerate(parts) for k in range(len(part))]
    return [parts[i][k] for _, i, k in sorted(places)]


def _shares(corpora: Sequence[Corpus], count: int) -> list[int]:
    """Divide `count` sequences among sources by weight, with the largest-remainder method.

    Raises:
        UsageError: a source would get none.
    """
    total = sum(corpus.weight for corpus in corpora)
    exact = [count * corpus.weight / total for corpus in corpora]
    shares = [int(share) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: count - sum(shares)]:
        shares[i] += 1
    if 0 in shares:
        name = corpora[shares.index(0)].name
        raise UsageError(f"{name} gets none of {count} sequences; read more samples, or give it a larger weight")
    return shares


def _documents(corpus: Corpus, tokenizer: Any, seed: int) -> Iterator[tuple[str, bool]]:
    """Yield each document once, and whether it is a chat; rows come in an order drawn with the seed.

    Raises:
        UsageError: a row has neither text nor messages, or the tokenizer's chat template rejects them.
    """
    if corpus.text is not None:
        yield corpus.text, False
        return
    for number in np.random.default_rng(seed).permutation(len(corpus.rows)).tolist():
        row, where = corpus.rows[number], f"row {number + 1} of {corpus.name}"
        if row.get("messages") is not None:
            yield _render_chat(row, where, tokenizer), True
        elif not is_encodable_text(row.get("text")):
            raise UsageError(
                f"{where} has {', '.join(map(str, row)) or 'no columns'}; calibration reads `messages` (a chat) or "
                "`text`: rename a column, or write a JSONL file that has one"
            )
        elif row["text"].strip():
            yield row["text"], False


def _read(corpus: Corpus, tokenizer: Any, count: int, seed: int) -> tuple[list[int], dict[str, Any]]:
    """Return a source's first `count` tokens, or all, and a record of what was read.

    A text follows the tokenizer's BOS token, or EOS without a BOS; a chat has only the tokens of its template.
    """
    ids: list[int] = []
    documents, digest = 0, hashlib.sha256()
    for text, is_chat in _documents(corpus, tokenizer, seed):
        ids += [] if is_chat else [prefix_token(tokenizer)]
        ids += encode_first_tokens(tokenizer, text, count)
        digest.update(f"{text}\0".encode())
        documents += 1
        if len(ids) >= count:
            break
    read = digest.hexdigest()[:16] if corpus.text is None else text_digest(corpus.text)
    return ids[:count], {"name": corpus.name, "digest": read, "weight": corpus.weight, "documents": documents}


def _render_chat(row: Row, where: str, tokenizer: Any) -> str:
    """Render a chat by the tokenizer's template."""
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"{where} is a chat, and the tokenizer of {tokenizer.name_or_path} has no chat template: copy "
            "chat_template.jinja from the model's chat version into its folder, or give rows of `text`"
        )
    messages = row["messages"]
    if not isinstance(messages, Sequence) or not all(isinstance(each, Mapping) for each in messages):
        raise UsageError(f"{where}: messages must be a list of mappings with role and content, got {messages!r:.60}")
    # A dataset's table has None for keys that a message lacks, and templates would read it as a value.
    given = [{key: value for key, value in each.items() if value is not None} for each in messages]
    try:
        text = tokenizer.apply_chat_template(given, tools=row.get("tools") or None, tokenize=False)
    except Exception as error:  # a template raises whatever its author wrote
        raise UsageError(f"{where}: the tokenizer's chat template refuses it: {error}") from error
    if not is_encodable_text(text):
        raise UsageError(f"{where} is not valid text: it contains half of a surrogate pair")
    return str(text)

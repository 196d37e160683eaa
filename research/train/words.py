"""Sentences of a small vocabulary, and the word-level tokenizer that reads them."""

import re
from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from diffquant.measure.protocols.needle import split_sentences

SPECIAL = ("<s>", "</s>", "<unk>")
_WORDS = re.compile(r"\w+|[^\w\s]+")


def split(text: str) -> list[str]:
    """Words and runs of punctuation of a text, in lower case, as the tokenizer splits them."""
    return _WORDS.findall(text.lower())


def simple_sentences(text: str, known: Iterable[str], frequent: int, most: int) -> tuple[list[str], list[str]]:
    """Sentences of 3 to `most` words, all of them known or among the text's `frequent` commonest.

    Returns:
        the sentences, and the vocabulary: the known words first, then the common ones.
    """
    known = list(dict.fromkeys(known))
    counts = Counter(word for word in split(text) if not any(c.isdigit() for c in word))
    words = known + [word for word, _ in counts.most_common(frequent + len(known)) if word not in known][:frequent]
    vocabulary = set(words)
    chosen = [s for s in split_sentences(text) if 3 <= len(parts := split(s)) <= most and vocabulary.issuperset(parts)]
    return chosen, words


def word_tokenizer(words: Iterable[str], context: int) -> PreTrainedTokenizerFast:
    """Tokenizer with a token for every word, <s> before a text; what is not in `words` is <unk>."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=context
    )

"""Tiny language models with a tokenizer, on disk."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from diffquant import data
from diffquant.quantization.conversion import convert
from tests.support.models import random_llama

WORDS = 400


@cache
def tokenizer(adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Tokenizer of a byte-level BPE over the bundled text; any text encodes."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([data.books_text()[:30000]], trainer)
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
WIDER = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 128}


def llama(max_length: int = 512, seed: int = 0, key_heads: int = 2, **changes: Any) -> LlamaForCausalLM:
    """Tiny Llama of random weights, large enough that its choices differ."""
    sizes = SIZES | {"num_key_value_heads": key_heads, "max_position_embeddings": max_length, "vocab_size": WORDS}
    rest = {"initializer_range": 0.3, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1}
    return random_llama(seed, **(sizes | rest | changes))


def write_llama(folder: Path, seed: int = 0) -> Path:
    """A Llama checkpoint with its tokenizer."""
    llama(seed=seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_diff_v2(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """The same Llama as DIFF V2 in float32, its weights such as a dtype holds."""
    source = folder.with_name(folder.name + "-source")
    llama(seed=seed).to(dtype).float().save_pretrained(source)
    tokenizer().save_pretrained(source)
    convert(source, folder, "diff-v2")
    return folder

"""Tiny GGUF files whose angles are scaled in every way that llama.cpp computes for a Llama, and its logits for them.

`make test-all ONLY=llama-cpp` fetches llama.cpp; `python -m tests.llama_cpp.cases` asks it and writes recorded.json.xz.
"""

import json
import lzma
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file

import diffquant
from diffquant import data
from diffquant.model.adapters import adapter_for
from tests.support.gguf_files import write_gguf

HERE = Path(__file__).parent
POCKET = Path(data.__file__).parent / "pocket"
RECORDED = HERE / "recorded.json.xz"
IS_INSTALLED = bool(shutil.which("node")) and (HERE / "node_modules/node-llama-cpp").is_dir()

CONFIG: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 90}
CONFIG |= {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024}
TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, 90, 48)]
# Where the logits are recorded: the shortest texts and the longest.
POSITIONS = (0, 7, 30, 47)
LLAMA3_1 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3_2 = LLAMA3_1 | {"factor": 32.0}

_SCALING = "llama.rope.scaling."
_LINEAR = {_SCALING + "type": "linear", _SCALING + "factor": 4.0}
_YARN = _LINEAR | {_SCALING + "type": "yarn"}
_SHORT = {_SCALING + "original_context_length": 64}
# Metadata, and the settings of Llama 3.1 behind the divisors that the file holds.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "plain": ({}, None),
    "another base": ({"llama.rope.freq_base": 100.0}, None),
    "linear": (_LINEAR, None),
    "linear unsaid": ({_SCALING + "factor": 4.0}, None),
    "linear of 2023": ({"llama.rope.scale_linear": 4.0}, None),
    "none": (_LINEAR | {_SCALING + "type": "none"}, None),
    "yarn": (_YARN | _SHORT, None),
    "yarn of the whole context": (_YARN, None),
    "yarn with a factor of attention": (_YARN | _SHORT | {_SCALING + "attn_factor": 0.7}, None),
    "llama 3.1": ({}, LLAMA3_1),
    "llama 3.2": ({}, LLAMA3_2),
    "llama 3 by another band": ({}, LLAMA3_1 | {"low_freq_factor": 2.0, "high_freq_factor": 12.0}),
    "sizes by layer": ({"llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2]}, None),
    "widths of heads": ({"llama.attention.key_length": 32, "llama.attention.value_length": 32}, None),
}


# Names of ways to split a text before merging; None is a file that names none.
SPLITS = (None, "default", "gpt-2", "llama-bpe", "tekken", "qwen2", "smollm")
# Vocabularies of SentencePiece, by whether the file asks for a space before a text; None is a file that does not say.
PREFIXES = (None, True, False)
BOS = 1
# Tokens of a vocabulary, the first at 40, and which of them a file states as its ends.
ENDS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "one that is stated": ((), {"eos": 2}),
    "a chat of ChatML": (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), {"eos": 40}),
    "Llama 3": (("<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>", "<|eom_id|>"), {"eos": 40}),
    "several stated": (("<end_of_turn>", "</s>"), {"eos": 2, "eot": 5, "eom": 7}),
    "code": (("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>"), {"eos": 2}),
    "code that is stated": (("<PAD>", "<reponame>"), {"eos": 2, "fim_pad": 9}),
    "parts of an answer": (("<|return|>", "<|call|>", "<|end|>"), {"eos": 2}),
    "an answer's last part": (("<|call|>", "<|end|>"), {"eos": 2}),
    "Solar": (("<|flush|>", "<|calls|>", "<|end|>"), {"eos": 42}),
    "names of others": (("<|eot|>", "<end>", "<|im_sep|>", "[EOS]", "<EOT>"), {"eos": 2}),
    "DeepSeek": (("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"), {"eos": 2}),
}
_FIRST_END, _VOCABULARY = 40, 50
TEXTS = (
    " leading",
    "  two spaces",
    "",
    "a",
    "It was 12345 and 7; it's 2024-01-01, I'LL go\n\n\n  there",
    "  a1b22c333 4444  55555\t\tnaïve ①② ½ 3.14159e10 1,000,000",
    "don't DON'T we've\r\n\r\nfoo_bar __init__ HelloWorld !!!??? \n",
)


def factors(settings: dict[str, Any], head_dim: int = 32, theta: float = 10000.0) -> list[float]:
    """The divisors that llama.cpp's converter writes for these settings, wave by wave in float32 as it does."""
    found = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim):
        wavelength = 2 * np.pi / frequency
        original, low, high = (
            settings[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(settings["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / settings["factor"] + smooth))
    return [float(np.float32(factor)) for factor in found]


def write_llama(folder: Path) -> Path:
    """A Llama of CONFIG; its weights come from NumPy's generator, which keeps its numbers from release to release."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    tensors = {}
    for name, shape in adapter_for(CONFIG).source_shapes().items():
        values = random.standard_normal(shape) * 0.15 if len(shape) > 1 else 1 + random.standard_normal(shape) * 0.1
        tensors[name] = torch.from_numpy(values.astype(np.float32))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_case(case: str, folder: Path, llama: Path) -> Path:
    """The GGUF file of a case."""
    metadata, settings = CASES[case]
    tensors = {} if settings is None else {"rope_freqs.weight": factors(settings)}
    metadata = {"llama.context_length": CONFIG["max_position_embeddings"]} | metadata
    return write_gguf(folder / f"{case}.gguf", llama, GGMLQuantizationType.F32, metadata, tensors)


def llama_cpp_logits(files: Sequence[Path]) -> dict[str, Any]:
    """llama.cpp's release, and its logits [files, POSITIONS, vocabulary]."""
    length = CONFIG["max_position_embeddings"]
    answer = _ask("logits.mjs", {"models": [str(file) for file in files], "tokens": TOKENS, "length": length})
    logits = [[rows[position] for position in POSITIONS] for rows in answer["answers"]]
    return {"release": answer["release"], "logits": logits}


def write_vocabulary(split: str | None, folder: Path) -> Path:
    """A GGUF file of the vocabulary of the models trained on prose, without weights."""
    content = json.loads((POCKET / "prose-transformer/tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    path = folder / f"{split}.gguf"
    writer = _vocabulary_writer(path, "gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([1] * len(vocabulary))
    merges = content["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    # node-llama-cpp takes a token 0 for none.
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(0)
    return _written(writer, path)


def write_pieces(prefix: bool | None, folder: Path) -> Path:
    """A GGUF file of a vocabulary as SentencePiece has it, with bytes for what it lacks, without weights."""
    vocabulary = json.loads((POCKET / "prose-transformer/tokenizer.json").read_text())["model"]["vocab"]
    by_place = sorted(vocabulary, key=vocabulary.get)[2:]
    pieces = [token.replace("\u0120", "\u2581") for token in by_place if token.replace("\u0120", "").isascii()]
    pieces.sort(key=lambda piece: len(piece) > 1)
    path = folder / f"pieces-{prefix}.gguf"
    writer = _vocabulary_writer(path, "llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces)])
    writer.add_token_scores([0.0] * 259 + [-float(place) for place in range(len(pieces))])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    return _written(writer, path)


def write_vocabularies(folder: Path) -> list[Path]:
    """The files of SPLITS, then those of PREFIXES."""
    return [write_tokenizer(place, folder) for place in range(len(SPLITS) + len(PREFIXES))]


def write_tokenizer(place: int, folder: Path) -> Path:
    """One of these files."""
    if place < len(SPLITS):
        return write_vocabulary(SPLITS[place], folder)
    return write_pieces(PREFIXES[place - len(SPLITS)], folder)


def write_ends(case: str, folder: Path) -> Path:
    """The GGUF file of a case of ENDS, without weights; none of its tokens is stated to be a control token."""
    names, stated = ENDS[case]
    path = folder / f"{case}.gguf"
    writer = _vocabulary_writer(path, "gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [chr(0x100 + token) for token in range(_VOCABULARY)]
    tokens[_FIRST_END : _FIRST_END + len(names)] = names
    writer.add_token_list(tokens)
    writer.add_token_types([1] * _VOCABULARY)
    writer.add_token_merges(["\u0100 \u0101"])
    writer.add_bos_token_id(BOS)
    for kind, token in stated.items():
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", token)
    return _written(writer, path)


# Schemes of exported files, of which 16 is one in float32. In products with codes llama.cpp rounds what they multiply
# to 8 bits.
EXPORTS = ("16", "4:g32", "5:g32", "8:row", "iq4_xs")
# Entries of the vocabulary of which an exported file's logits are recorded.
COLUMNS = 64
PROSE = data.books_text()[5000:5300]


def write_export(scheme: str, folder: Path) -> Path:
    """An exported file of the Transformer trained on prose; rows of its down_proj are no whole blocks.

    Weights are rounded to nearest, so that a better search of scales leaves the record as it is.
    """
    source, file = POCKET / "prose-transformer", folder / f"{scheme.replace(':', '-')}.gguf"
    if scheme == "16":
        diffquant.export(source, file, to="gguf", dtype="float32")
    elif scheme == "iq4_xs":
        wide = write_widened(source, folder / "wide")
        diffquant.quantize(
            wide, file, {"weights": "iq4_nl", "overrides": {"*.down_proj": scheme}}, rounding="nearest", to="gguf"
        )
    else:
        diffquant.quantize(
            source, file, {"weights": scheme, "overrides": {"*.down_proj": "16"}}, rounding="nearest", to="gguf"
        )
    return file


def write_widened(source: Path, folder: Path, width: int = 512) -> Path:
    """The same model with zeros in its MLPs, whose rows of down_proj are then whole blocks of 256."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    lacking = width - config["intermediate_size"]
    for name, tensor in tensors.items():
        if ".mlp." in name:
            sizes = (0, lacking) if "down_proj" in name else (0, 0, 0, lacking)
            tensors[name] = torch.nn.functional.pad(tensor, sizes)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": width}))
    return folder


def export_tokens() -> list[int]:
    """Tokens of PROSE, as the exported files' source makes them."""
    tokens: list[int] = diffquant.load_tokenizer(POCKET / "prose-transformer").encode(PROSE)[: len(TOKENS)]
    return tokens


def llama_cpp_exports(files: Sequence[Path]) -> dict[str, Any]:
    """llama.cpp's logits [files, POSITIONS, COLUMNS] of exports, and the last one's tokens of PROSE and TEXTS."""
    asked = {"models": [str(file) for file in files], "tokens": export_tokens(), "length": 512}
    answers = _ask("logits.mjs", asked)["answers"]
    logits = [[[round(logit, 4) for logit in rows[at][:COLUMNS]] for at in POSITIONS] for rows in answers]
    return {"logits": logits, "tokens": _ask("tokens.mjs", {"models": [str(files[-1])], "texts": [PROSE, *TEXTS]})[0]}


def llama_cpp_ends(files: Sequence[Path]) -> list[list[int]]:
    """For each file the tokens at which llama.cpp stops."""
    answers: list[list[int]] = _ask("ends.mjs", {"models": [str(file) for file in files], "size": _VOCABULARY})
    return answers


def _vocabulary_writer(path: Path, kind: str) -> GGUFWriter:
    writer = GGUFWriter(path, "llama")
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count):
        add(1)
    writer.add_feed_forward_length(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    return writer


def _written(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def llama_cpp_tokens(files: Sequence[Path]) -> list[dict[str, Any]]:
    """For each file whether llama.cpp begins a text with BOS, and its tokens of TEXTS."""
    answers: list[dict[str, Any]] = _ask("tokens.mjs", {"models": [str(file) for file in files], "texts": TEXTS})
    return answers


def _ask(program: str, request: dict[str, Any]) -> Any:
    command = ["node", str(HERE / program)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed:\n{done.stderr}")
    return json.loads(done.stdout)


def record() -> None:
    """Write down what llama.cpp computes for every case."""
    with tempfile.TemporaryDirectory() as folder:
        llama = write_llama(Path(folder) / "llama")
        answer = llama_cpp_logits([write_case(case, Path(folder), llama) for case in CASES])
        tokens = llama_cpp_tokens(write_vocabularies(Path(folder)))
        ends = llama_cpp_ends([write_ends(case, Path(folder)) for case in ENDS])
        exports = llama_cpp_exports([write_export(scheme, Path(folder)) for scheme in EXPORTS])
    content = {
        "llama.cpp": answer["release"],
        "node-llama-cpp": json.loads((HERE / "package.json").read_text())["dependencies"]["node-llama-cpp"],
        "logits": {
            case: [[round(logit, 5) for logit in row] for row in rows]
            for case, rows in zip(CASES, answer["logits"], strict=True)
        },
        "tokens": tokens,
        "ends": dict(zip(ENDS, ends, strict=True)),
        "exports": exports,
    }
    RECORDED.write_bytes(lzma.compress(json.dumps(content).encode() + b"\n"))


if __name__ == "__main__":
    record()

"""Export of a search's widths to a file for llama.cpp's quantizer, `llama-quantize --tensor-type-file`.

A line is PATTERN=TYPE without spaces: a regular expression, searched for in a tensor's name, and a ggml type. The first
matching line applies.

A width becomes the ggml type with that many bits whose rounding is most similar to absmax. q4_0, q5_0 and q8_0 have a
scale per 32 weights, like `4:g32`. q2_K, q3_K and q6_K have quantized scales within blocks of 256 weights; if 256 does
not divide a row, llama-quantize chooses another type.

Source: llama.cpp, tools/quantize/quantize.cpp (parse_tensor_type_file) and src/llama-quant.cpp.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from diffquant.calib.search.result import SearchResult, Width, format_width
from diffquant.checkpoints.gguf_config import IN_LAYERS
from diffquant.errors import UsageError
from diffquant.support.files import read_text
from diffquant.support.outputs import check_output_file

TYPES: dict[Width, str] = {2: "q2_K", 3: "q3_K", 4: "q4_0", 5: "q5_0", 6: "q6_K", 8: "q8_0"}
# A line that `format_tensor_types` writes.
_LINE = re.compile(r"\^blk\\\.\([0-9|]+\)\\\.\w+\\\.weight\$=\w+")


def format_tensor_types(result: SearchResult) -> str:
    """Return a search's widths as lines for llama-quantize: one for each projection and ggml type, with its layers.

    Raises:
        UsageError: the search has no weights, or widths have no ggml type, or weights have no name in GGUF; the
            message names all of these.
    """
    names = {module: name for name, module in IN_LAYERS.items()}
    weights = [unit for unit in result.measurements if unit.target == "weights"]
    chosen = {unit.name: unit.chosen for unit in weights if unit.chosen is not None}
    check_ggml_types([unit.target for unit in weights], list(chosen.values()))
    check_gguf_names(unit.kind for unit in weights)
    layers: dict[tuple[str, str], list[int]] = {}
    for unit in weights:
        layers.setdefault((names[unit.kind], TYPES[chosen[unit.name]]), []).append(unit.layer)
    return "".join(
        rf"^blk\.({'|'.join(map(str, sorted(numbers)))})\.{re.escape(name)}\.weight$={kind}" + "\n"
        for (name, kind), numbers in layers.items()
    )


def check_ggml_types(targets: Sequence[str], widths: Sequence[Width]) -> None:
    """Check, before a search, that its targets and widths can be written for llama-quantize.

    Raises:
        UsageError: weights are not among the targets, or some widths have no ggml type; the message names all.
    """
    if "weights" not in targets:
        raise UsageError("llama-quantize uses only widths of weights, which are not among the targets")
    untyped = dict.fromkeys(format_width(width) for width in widths if width not in TYPES)
    if untyped:
        raise UsageError(f"ggml has no type for {', '.join(untyped)}; choose from {list(TYPES)}")


def check_gguf_names(kinds: Iterable[str], maps: int = 1) -> None:
    """Check that a GGUF file has names for weights of these kinds.

    Args:
        kinds: kinds of weights, as in `Unit.kind`.
        maps: number of attention maps per head of the model; llama.cpp supports only 1.

    Raises:
        UsageError: some kinds have no name in GGUF, or llama.cpp does not support the attention; the message names all.
    """
    if maps > 1:
        raise UsageError("llama.cpp has no DIFF attention, so llama-quantize cannot use widths of this model")
    unnamed = sorted(set(kinds) - set(IN_LAYERS.values()))
    if unnamed:
        raise UsageError(f"a Llama's GGUF file has no tensors for {', '.join(unnamed)}; search other kinds of weights")


def check_types_output(file: Path, made: Path) -> None:
    """Check, before a search, that a file for llama-quantize can be written, and would not replace any other file.

    Args:
        made: output folder of the search, which need not exist yet.

    Raises:
        OutputExistsError: the file exists and contains something else.
        UsageError: the file cannot be written.
    """
    folder = file.absolute().parent
    if not folder.is_dir() and folder != made.absolute():
        raise UsageError(f"the folder {folder}, where {file.name} would be written, does not exist")
    check_output_file(file, _holds_lines(file))


def _holds_lines(file: Path) -> bool:
    try:
        return all(_LINE.fullmatch(line) for line in read_text(file).splitlines())
    except (OSError, ValueError):
        return False

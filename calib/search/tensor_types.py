"""The widths of a search as llama.cpp's quantizer takes them: `llama-quantize --tensor-type-file`.

A line is PATTERN=TYPE, without a space: a regular expression that is looked for in a tensor's name, of which the first
that is found counts, and a type of ggml. A width becomes the type of that many bits that is nearest to absmax: q4_0,
q5_0 and q8_0 have a scale for 32 weights, as `4:g32` has, and q2_K, q3_K and q6_K scales of scales over 256, for which
llama-quantize takes another type where 256 does not divide a row.

Source: llama.cpp, tools/quantize/quantize.cpp (parse_tensor_type_file) and src/llama-quant.cpp.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from diffquant.calib.search.result import SearchResult
from diffquant.calib.search.widths import Width, spoken
from diffquant.errors import UsageError
from diffquant.formats.gguf_names import IN_LAYERS
from diffquant.support.files import read_text
from diffquant.support.outputs import check_written_file

TYPES: dict[Width, str] = {2: "q2_K", 3: "q3_K", 4: "q4_0", 5: "q5_0", 6: "q6_K", 8: "q8_0"}
# What `tensor_types` writes.
_LINE = re.compile(r"\^blk\\\.\([0-9|]+\)\\\.\w+\\\.weight\$=\w+")


def tensor_types(result: SearchResult) -> str:
    """The lines, a projection and type each, with the layers that have it.

    Raises:
        UsageError: the search gave no weights widths, or ones that ggml has no type of, or GGUF no name for; all are
            named.
    """
    names = {module: name for name, module in IN_LAYERS.items()}
    weights = [unit for unit in result.measurements if unit.target == "weights"]
    chosen = {unit.name: unit.chosen for unit in weights if unit.chosen is not None}
    check_widths([unit.target for unit in weights], list(chosen.values()))
    check_kinds(unit.kind for unit in weights)
    layers: dict[tuple[str, str], list[int]] = {}
    for unit in weights:
        layers.setdefault((names[unit.kind], TYPES[chosen[unit.name]]), []).append(unit.layer)
    return "".join(
        rf"^blk\.({'|'.join(map(str, sorted(numbers)))})\.{re.escape(name)}\.weight$={kind}" + "\n"
        for (name, kind), numbers in layers.items()
    )


def check_widths(targets: Sequence[str], widths: Sequence[Width]) -> None:
    """Check, before a search, that its lines can be written.

    Raises:
        UsageError: weights are not among the targets, or ggml has no type of some widths; all are named.
    """
    if "weights" not in targets:
        raise UsageError("llama.cpp's quantizer takes widths of weights alone, which are not among the targets")
    untyped = dict.fromkeys(spoken(width) for width in widths if width not in TYPES)
    if untyped:
        raise UsageError(f"no type of ggml is written for {', '.join(untyped)}; choose among {list(TYPES)}")


def check_kinds(kinds: Iterable[str], maps: int = 1) -> None:
    """Check that a GGUF file has names for weights of these kinds.

    Args:
        maps: attention maps of the model, of which llama.cpp's have one.

    Raises:
        UsageError: it has none for some, all of which are named, or llama.cpp has no such attention.
    """
    if maps > 1:
        raise UsageError("llama.cpp has no DIFF attention, so llama-quantize cannot take widths of this model")
    unnamed = sorted(set(kinds) - set(IN_LAYERS.values()))
    if unnamed:
        raise UsageError(f"a GGUF file of a Llama has no tensors for {', '.join(unnamed)}, so no line can name them")


def check_lines_output(file: Path, made: Path) -> None:
    """Check, before a search, that its lines can be written to a file, and replace none but such lines.

    Args:
        made: the search's own folder, which need not exist yet.

    Raises:
        OutputExistsError: the file holds something else.
        UsageError: nothing can be written there.
    """
    folder = file.absolute().parent
    if not folder.is_dir() and folder != made.absolute():
        raise UsageError(f"the folder {folder}, where {file.name} would be written, does not exist")
    check_written_file(file, _holds_lines(file))


def _holds_lines(file: Path) -> bool:
    try:
        return all(_LINE.fullmatch(line) for line in read_text(file).splitlines())
    except (OSError, ValueError):
        return False

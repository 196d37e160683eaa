"""Export of a Llama, quantized or not, to a GGUF file; codes stay unchanged, and scales become float16.

Blocks of Q4_0, Q5_0, Q8_0 and IQ4_NL have 32 codes of one row and a float16 scale; IQ4_XS has 256 with 8 scales.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; ggml, src/ggml-common.h.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from diffquant.checkpoints.atomic_folder import RECORD, check_output, stage_output
from diffquant.checkpoints.gguf import PLAIN_TYPES, is_own_gguf
from diffquant.checkpoints.gguf_tokenizer import load_gguf_tokenizer
from diffquant.checkpoints.location import is_gguf
from diffquant.checkpoints.row_stream import checkpoint_key, convert_rows, open_workers, row_blocks
from diffquant.checkpoints.side_files import format_front_matter
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.tokenizer import find_differing_text
from diffquant.errors import CheckpointError, DiffQuantError, OutputExistsError, UsageError
from diffquant.onnx.gguf.plan import BLOCK, GgufPlan, plan_gguf
from diffquant.onnx.graph.matrix import Matrix
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.reports.tables import compare_size
from diffquant.support.digests import FileDigests
from diffquant.support.files import replace_atomically, sync_to_disk, write_atomically
from diffquant.support.installation import versions
from diffquant.support.names import option_name
from diffquant.support.outputs import check_output_file
from diffquant.support.progress import Progress, report_nothing
from diffquant.support.terminal import PrintableResult, markdown_code, markdown_text

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_CARD = """{head}
# {title}, as GGUF

Exported from {name} ({model_type}) by diffquant: {types}.

`llama-server -m {file}` and other programs of llama.cpp run it, and `diffquant.load` reads it back.
"""


@dataclass(frozen=True, repr=False)
class GgufReport(PrintableResult):
    """Result of an export to GGUF.

    Attributes:
        file: file that was written.
        bytes_before: size of the checkpoint's weights in bytes.
        bytes_after: size of the file in bytes.
        weights: number of the checkpoint's weights.
        types: number of tensors of each ggml type.
        seconds: duration of the export.
        notes: sentences for the user.
    """

    file: Path
    bytes_before: int
    bytes_after: int
    weights: int
    types: Mapping[str, int]
    seconds: float
    notes: tuple[str, ...]

    def summary(self) -> str:
        """Return a few lines of text for the user."""
        size = compare_size(self.bytes_after, self.bytes_before, self.weights)
        lines = [f"{self.file}: {size}, in {self.seconds:.1f} s", f"  tensors: {_format_types(self.types)}"]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def export_gguf(
    source: Path | str | Source,
    output: Path | str,
    weights: Scheme = FULL,
    *,
    embedding_and_head: Scheme = FULL,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Progress = report_nothing,
) -> GgufReport:
    """Write a Llama as a GGUF file, with one tensor in memory at a time.

    Args:
        source: a checkpoint folder, quantized or not, or a .gguf file.
        output: a file that ends in .gguf, or a folder to create for the file and a model card.
        weights: scheme of the linears if the checkpoint is not quantized.
        embedding_and_head: scheme of embedding and head if the checkpoint is not quantized.
        dtype: dtype of matrices that are not quantized; by default the checkpoint's.
        overwrite: replace an output that diffquant wrote.
        progress: called with the bytes written.

    Raises:
        DiffQuantError: the checkpoint, the options or the output are invalid; nothing is written then.
    """
    started, output = time.monotonic(), Path(output)
    check_gguf_output(source.path if isinstance(source, Source) else Path(source), output, overwrite)
    opened = open_source(source)
    plan = plan_gguf(opened, weights, embedding_and_head, dtype)
    with _open_output(plan, output, overwrite) as file:
        notes, nbytes = _write(plan, file, progress), file.stat().st_size
        if file.suffix == ".gguf":
            _describe(plan, file)
    place, before = output if is_gguf(output) else output / file.name, opened.checkpoint.stored_nbytes
    seconds = time.monotonic() - started
    return GgufReport(place, before, nbytes, opened.weight_count, plan.types, seconds, (*plan.notes, *notes))


def check_gguf_output(source: Path, output: Path, overwrite: bool) -> None:
    """Check, before the export, that the output can be written.

    An existing output is replaced only if diffquant wrote it and `overwrite` is true.

    Raises:
        OutputExistsError: the output exists and `overwrite` is false, or diffquant did not write it.
        UsageError: the output overlaps the source, or cannot be written.
    """
    if not is_gguf(output):
        check_output(source, output, overwrite)
        return
    if output.resolve() == source.resolve():
        raise UsageError(f"the output {output} is the input; choose another file")
    if os.path.lexists(output) and not overwrite:
        raise OutputExistsError(f"{output} exists; choose another output or pass {option_name('overwrite', True)}")
    check_output_file(output, is_own_gguf(output, "model"))


@contextmanager
def _open_output(plan: GgufPlan, output: Path, overwrite: bool) -> Iterator[Path]:
    """Yield the path to write to; afterwards the file, or the folder that it is in, becomes the output atomically."""
    checkpoint = plan.source.checkpoint
    if not is_gguf(output):
        key = {"verb": "export", "to": "gguf", "source": checkpoint_key(checkpoint)} | versions()
        with stage_output(output, key, checkpoint.stored_nbytes, overwrite) as staging:
            yield staging.folder / f"{Path(checkpoint.name).name}-{plan.main_type}.gguf"
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(output) as file:
            yield file
    except OSError as error:
        raise DiffQuantError(f"writing {output} failed: {error.strerror}; no partial file is kept") from error


def _write(plan: GgufPlan, file: Path, progress: Progress) -> tuple[str, ...]:
    """Write the file; return sentences for the user on rounded scales and tokenizer differences."""
    writer, done = plan.writer, 0
    rounded: list[tuple[int, float]] = []
    total = sum(rows * nbytes for rows, nbytes in map(plan.rows_and_row_bytes, plan.matrices))
    with closing(writer), open_workers() as pool:
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in plan.vectors.values():
            writer.write_tensor_data(values)
        for name, matrix in plan.matrices.items():
            data = np.empty(plan.rows_and_row_bytes(name), np.uint8)

            def fill(rows: tuple[int, int], data: Bytes = data, name: str = name) -> tuple[int, float]:
                data[slice(*rows)], count, worst = _rows(plan.matrices[name], plan.kinds[name], *rows)
                return count, worst

            rounded += pool.map(fill, row_blocks(*matrix.shape))
            writer.write_tensor_data(data)
            done += data.nbytes
            progress(done, total, matrix.stored_name)
    sync_to_disk(file)
    notes = []
    if count := sum(each for each, _ in rounded):
        worst = max(error for _, error in rounded)
        notes.append(f"{count:,} scales are rounded to float16, with a relative error of {worst:.2g} at most")
    if (text := find_differing_text(load_gguf_tokenizer(file), plan.source.tokenizer)) is not None:
        notes.append(f"llama.cpp splits some texts differently from the checkpoint's tokenizer, such as {text[:40]!r}")
    return tuple(notes)


def _rows(matrix: Matrix, kind: GGMLQuantizationType, first: int, last: int) -> tuple[Bytes, int, float]:
    """Return the stored bytes of some rows, the number of inexact float16 scales, and their largest relative error."""
    if not matrix.scheme.quantizes:
        values = convert_rows(matrix.read_unquantized(first, last), PLAIN_TYPES[kind], matrix.stored_name)
        return values.contiguous().view(torch.uint8).numpy(), 0, 0.0
    codes, scales, number_format = matrix.read_codes(first, last), matrix.read_scales(first, last), matrix.scheme.format
    if number_format.scales_per_step > 1:
        packed = scales if scales.dtype == torch.uint8 else number_format.pack_scale(scales)
        return pack_blocks(codes, packed, number_format.code_width, BLOCK * number_format.scales_per_step), 0, 0.0
    scales = scales.float()
    halves = scales.half()
    if not torch.isfinite(halves).all():
        raise CheckpointError(f"{matrix.stored_name} has a scale of {scales.max():g}, above float16's maximum of 65504")
    # A scale of 0 is exact.
    errors = (halves.float() / scales - 1).abs().nan_to_num(0)
    return pack_blocks(codes, halves, number_format.code_width), int((errors > 0).sum()), float(errors.max())


def pack_blocks(codes: Tensor, scales: Tensor, bits: int, size: int = BLOCK) -> Bytes:
    """Pack codes and scales into ggml's blocks.

    Args:
        codes: int8 [rows, in].
        scales: float16 [rows, groups], where a group is one block or several; for IQ4_XS, uint8 [rows, in / 32] as the
            file stores them.
        bits: 4, 5 or 8.
        size: number of codes in a block, a multiple of 32.

    Returns:
        uint8 [rows, bytes per row].
    """
    rows, groups = len(codes), codes.shape[1] // BLOCK
    parts: list[Bytes] = [scales.repeat_interleave(groups // scales.shape[1], 1).numpy().view(np.uint8)]
    values = codes.numpy().reshape(rows, groups, BLOCK)
    if bits == 8:
        parts.append(values.view(np.uint8))
    else:
        levels = (values + (1 << bits - 1)).astype(np.uint8)
        if bits == 5:
            parts.append(np.packbits(levels >> 4, axis=-1, bitorder="little"))
        low = levels & 15
        parts.append((low[..., : BLOCK // 2] | low[..., BLOCK // 2 :] << 4).astype(np.uint8))
    return np.concatenate([part.reshape(rows, codes.shape[1] // size, -1) for part in parts], -1).reshape(rows, -1)


def _format_types(types: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(types.items()))


def _describe(plan: GgufPlan, file: Path) -> None:
    """Write the model card and diffquant.json into a file's folder."""
    checkpoint = plan.source.checkpoint
    has_codes = any(matrix.scheme.quantizes for matrix in plan.matrices.values())
    card = _CARD.format(
        head=format_front_matter("gguf", ["diffquant"], checkpoint.front_matter, "quantized" if has_codes else None),
        title=markdown_text(checkpoint.name),
        name=markdown_code(checkpoint.name),
        model_type=markdown_text(plan.source.model_type),
        types=_format_types(plan.types),
        file=file.name,
    )
    write_atomically(file.with_name("README.md"), card)
    digests = FileDigests.compute(checkpoint.weight_files()).to_dict()
    record: dict[str, Any] = {"format": "gguf", "versions": versions(), "source": {"name": checkpoint.name, **digests}}
    write_atomically(file.with_name(RECORD), json.dumps(record, indent=2) + "\n")

"""The verb `fidelity`: how far one model's next-token distributions are from another's."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.support.code import provenance
from diffquant.support.outputs import check_written_file
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress, progress_for
from diffquant.support.versions import versions

if TYPE_CHECKING:
    from torch import Tensor

    from diffquant.evals.fidelity.result import Fidelity
    from diffquant.evals.fidelity.sides import Side

CHARACTERS = 65536
CONTEXT = 512
TOP_K = 20


def fidelity(
    reference: Path | str,
    candidate: Path | str | None = None,
    *,
    text: Path | str | None = None,
    characters: int = CHARACTERS,
    context: int | None = None,
    top_k: int = TOP_K,
    output: Path | str | None = None,
    dataset: str | None = None,
    save_base: Path | str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> "Fidelity | None":
    """Measure how far a model's next-token distributions are from another's, as quantized models are compared.

        print(diffquant.fidelity("checkpoint", "checkpoint-4bit").summary())

    Both read the same text in chunks that do not overlap, and the second half of each chunk is scored, as llama.cpp's
    `llama-perplexity --kl-divergence` does, whose files of log-probabilities can be either side.

    Args:
        reference, candidate: each a checkpoint folder, plain or quantized; a .gguf file; a folder that `export` wrote;
            a file that `save_base` or `llama-perplexity --kl-divergence-base` wrote; or the URL of an OpenAI-compatible
            server that tells prompt log-probabilities, such as vLLM's. Of a server only the likeliest tokens are
            known, and the result is a lower bound then.
        text: text file to read; the prose that ships by default. A file of log-probabilities holds its own.
        characters: number of characters to read, from the text's end, since roundings read it from its beginning; 0
            reads all.
        context: number of tokens of a chunk; 512 by default. A file of log-probabilities has its own.
        top_k: number of the likeliest tokens to ask a server for.
        output: folder for fidelity.json, and fidelity.md with the table for a model card.
        dataset: ORG/NAME of the text's dataset on the hub, for an entry in `output`'s .eval_results that the hub reads.
        save_base: file to write the reference's log-probabilities to, in llama.cpp's format, in place of a comparison:
            then a candidate is compared without the reference in memory. It takes 2 bytes for each scored token and
            entry of the vocabulary.
        dtype: dtype of models that run here: "auto" (bfloat16 where it is native, else float32), or a dtype's name.
        device: device of models that run here; "auto" is CUDA where there is one, else the processor.
        progress: function called with the chunks done; by default a line on a terminal, one per minute in a log.

    Returns:
        The result, or None where `save_base` was written.

    Raises:
        UsageError: the two have not the same vocabulary or make other tokens of the text, or it fills no chunk.
        OutputExistsError: an output would replace what diffquant did not write.
        DiffQuantError: a checkpoint or file cannot be read, or a server does not answer.
    """
    if (candidate is None) == (save_base is None):
        raise UsageError("give a candidate to compare with the reference, or a file to save the reference's base in")
    if dataset is not None and output is None:
        raise UsageError("the entry for a dataset is written into an output folder: give output, too")
    progress = progress or progress_for("fidelity")
    reading = _Reading(text, characters, context)
    if candidate is None:
        _save(_opened(str(reference), top_k, dtype, device), reading, Path(str(save_base)), progress)
        return None

    from diffquant.evals.fidelity.outputs import FILES, write_fidelity

    if output is not None:
        FILES.check(Path(output))
    result = _compared([_opened(str(side), top_k, dtype, device) for side in (reference, candidate)], reading, progress)
    if output is not None:
        write_fidelity(result, Path(output), dataset)
    return result


@dataclass(frozen=True)
class _Reading:
    """What is read, as `fidelity` takes it."""

    text: Path | str | None
    characters: int
    context: int | None


def _save(side: "Side", reading: _Reading, output: Path, progress: Progress) -> None:
    from diffquant.evals.fidelity.base_file import MAGIC
    from diffquant.evals.fidelity.measure import save_base

    check_written_file(output, is_own=_begins_with(output, MAGIC))
    save_base(side, _chunks([side], reading)[0], output, progress)


def _compared(sides: "list[Side]", reading: _Reading, progress: Progress) -> "Fidelity":
    from diffquant.evals.fidelity.base_file import scored
    from diffquant.evals.fidelity.calibration import calibration_note
    from diffquant.evals.fidelity.measure import compare
    from diffquant.evals.fidelity.result import Fidelity
    from diffquant.source.source import open_source

    chunks, about = _chunks(sides, reading)
    comparison = compare(sides[0], sides[1], chunks, progress)
    reference, candidate = ({"name": side.name, **side.about()} for side in sides)
    if candidate["kind"] == "checkpoint":
        targets = chunks[:, -scored(chunks.shape[1]) :].tolist()
        about["calibration"] = calibration_note(open_source(candidate["name"]), targets)
    return Fidelity.of(comparison, reference, candidate, about, {**provenance(__name__), "versions": versions()})


def _opened(place: str, top_k: int, dtype: str, device: str) -> "Side":
    from diffquant.evals.fidelity.base_file import MAGIC, BaseFile
    from diffquant.evals.fidelity.server import Server
    from diffquant.evals.fidelity.sides import Stored

    if place.startswith(("http://", "https://")):
        return Server(place, top_k)
    if _begins_with(Path(place), MAGIC):
        return Stored(BaseFile.open(Path(place)))
    return _model(Path(place), dtype, device)


def _begins_with(file: Path, magic: bytes) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(magic)) == magic


def _model(path: Path, dtype: str, device: str) -> "Side":
    """A checkpoint or an exported folder, open."""
    from diffquant.evals.fidelity.sides import Model
    from diffquant.evals.torch_model import TorchModel
    from diffquant.export.targets import runtime_of
    from diffquant.loading import load
    from diffquant.source.source import open_source

    runtime = runtime_of(path)
    if runtime is not None:
        described = runtime.describe(path, device)
        model, tokenizer = runtime.open(path, device)
        return Model(path, model, tokenizer, {"kind": "export", "scheme": described.scheme, **described.identity})
    source = open_source(path)
    loaded = load(source, dtype=dtype, device=device)
    about = {
        "kind": "checkpoint",
        "fingerprint": source.fingerprint,
        "recipe": source.recipe.to_dict(),
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }
    return Model(path, TorchModel(loaded), source.tokenizer, about)


def _chunks(sides: "list[Side]", reading: _Reading) -> "tuple[Tensor, JsonObject]":
    """The tokens that are read, in chunks, and what they are."""
    from diffquant.evals.fidelity.base_file import scored
    from diffquant.evals.fidelity.measure import chunks_of
    from diffquant.evals.fidelity.result import parts_of
    from diffquant.text.corpus import load_text, text_digest

    about: JsonObject
    stored = next((side for side in sides if side.fixed_chunks is not None), None)
    if stored is not None:
        if (reading.text, reading.context) != (None, None):
            raise UsageError(f"{stored.name} holds its text's tokens in chunks: leave out text and context")
        read, about = "", {"name": f"the text of {stored.name}"}
    else:
        whole = load_text(None if reading.text is None else Path(reading.text))
        read = whole[-reading.characters :] if reading.characters else whole
        name = "the prose that ships" if reading.text is None else Path(reading.text).name
        about = {"name": name, "digest": text_digest(read), "characters": len(read)}
    chunks = chunks_of(sides, read, reading.context or CONTEXT)
    count, length = chunks.shape
    about |= {"context": length, "chunks": count, "scored": count * scored(length), "parts": parts_of(count)}
    return chunks, about

"""The verb `fidelity`: measures how far one model's next-token distributions are from another's."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.checkpoints.location import check_location
from diffquant.errors import UsageError
from diffquant.support.names import option_name
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds, notes
from diffquant.verbs.arguments import check_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from diffquant.checkpoints.source import Source
    from diffquant.measure.fidelity.models import ComparedModel
    from diffquant.measure.fidelity.result import Fidelity

CONTEXT = 512
# Number of characters of a text that are read by default.
CHARACTERS = 65536


def _check_side(place: Path | str) -> None:
    """Check that a checkpoint is there; a file or URL is checked when it is opened."""
    if not str(place).startswith(_SERVERS) and not Path(place).is_file():
        check_location(Path(place))


_SERVERS = ("http://", "https://")
_SIDE = kinds.Kind(str, is_positional=True, check=_check_side)
Reference = Annotated[kinds.PathText, replace(_SIDE, placeholder="REFERENCE")]
Candidate = Annotated[kinds.PathText, replace(_SIDE, placeholder="CANDIDATE")]
Characters = Annotated[int, kinds.Kind(int, "NUMBER", least=0)]
Context = Annotated[int, kinds.Kind(int, "TOKENS", least=4)]


@check_arguments
def fidelity(
    reference: Reference,
    candidate: Candidate | None = None,
    *,
    text: kinds.File | None = None,
    characters: Characters = CHARACTERS,
    context: Context | None = None,
    top_k: kinds.Count = 20,
    output: kinds.NewFolder | None = None,
    card: bool = False,
    save_base: kinds.File | None = None,
    dtype: kinds.Name = "auto",
    device: kinds.Name = "auto",
    progress: Progress | None = None,
) -> "Fidelity | None":
    """Measure how far a model's predictions are from another's.

        diffquant fidelity model model-4bit
        print(diffquant.fidelity("model", "model-4bit").summary())

    Shows the mean, median, 99 %, 99.9 % and largest KL divergence of the next token, and how often both models have the
    same top-1 token, with 95 % confidence intervals. Both read the same text in chunks that do not overlap. The second
    half of each chunk is scored, like llama.cpp's llama-perplexity --kl-divergence.

    Args:
        reference: the reference model: a checkpoint folder, .gguf file, exported folder, file of log-probabilities from
            `save_base` or llama.cpp's --kl-divergence-base, or URL of a server that returns prompt log-probabilities,
            such as vLLM. A server gets the key in VLLM_API_KEY if that is set. It returns only the likeliest tokens, so
            the result is a lower bound.
        candidate: the model to compare with the reference, in the same form.
        text: text to read; the bundled text by default. A file of log-probabilities contains its text.
        characters: number of characters to read from the end of the text, because roundings calibrate on its beginning;
            0 reads all.
        context: number of tokens in a chunk; by default 512, or less if a model or server allows less. A file of
            log-probabilities has a fixed number.
        top_k: number of likeliest tokens to request from a server.
        output: folder for the numbers, and a table for the model card.
        card: write the table into the model card of the candidate, a local folder; it replaces an earlier table.
        save_base: file for the reference's log-probabilities in llama.cpp's format; give it instead of a candidate. It
            takes 2 bytes for each scored token and vocabulary entry.
        dtype: auto (bfloat16 where it is native), float32, bfloat16 or float16.
        device: see `search`.
        progress: function called with the chunks done; by default a line on a terminal, one per minute in a log.

    Returns:
        The result, or None if `save_base` was written.

    Raises:
        UsageError: the models have different vocabularies or tokenize the text differently, the text is shorter than a
            chunk, or a chunk is longer than a model or server allows.
        OutputExistsError: an output would replace a file that diffquant did not write.
        DiffQuantError: a checkpoint or file cannot be read, or a server does not answer.
    """
    device = notes.choose_device(device)
    if (candidate is None) == (save_base is None):
        raise UsageError(f"give a candidate to compare, or {option_name('save_base', 'FILE')} instead")
    if card and (candidate is None or not Path(candidate).is_dir()):
        raise UsageError(
            f"{option_name('card', True)} needs a candidate that is a local folder, whose model card it changes"
        )
    from diffquant.measure.fidelity import save_base_file as write_base
    from diffquant.measure.fidelity.result import FILES, write_fidelity, write_to_card
    from diffquant.support.files import check_writable
    from diffquant.support.outputs import check_output_file

    shown, base = progress or progress_for("fidelity"), None if save_base is None else Path(save_base)
    if base is not None:
        check_output_file(base, is_own=_is_base_file(base))
    elif output is not None:
        FILES.check(Path(output))
    if card:
        check_writable(Path(str(candidate)))
    sides = [_open(str(place), top_k, dtype, device) for place in (reference, candidate) if place is not None]
    chunks, about = _chunks(sides, text, characters, context)
    if base is not None:
        write_base(sides[0], chunks, base, shown)
        notes.say_files_written([base])
        return None
    result = _compare(sides, chunks, about, shown)
    if output is not None:
        notes.say_files_written(write_fidelity(result, Path(output)))
    if card:
        notes.say_files_written([write_to_card(result, Path(str(candidate)))])
    return result


def _compare(sides: "list[ComparedModel]", chunks: "Tensor", about: JsonObject, progress: Progress) -> "Fidelity":
    from diffquant.measure.fidelity import calibration_note, compare_distributions
    from diffquant.measure.fidelity.models import count_scored_positions
    from diffquant.measure.fidelity.result import Fidelity
    from diffquant.support.installation import provenance, versions

    comparison = compare_distributions(sides[0], sides[1], chunks, progress)
    reference, candidate = ({"name": side.name, **side.describe_model()} for side in sides)
    of_reference, of_candidate = (side.source for side in sides[:2])
    if of_reference and of_reference.packed and of_candidate and _is_unquantized(of_candidate):
        notes.say("note: the reference has quantized weights and the candidate has not; did you swap the two models?")
    if of_candidate is not None:
        targets = chunks[:, -count_scored_positions(chunks.shape[1]) :].tolist()
        about["calibration"] = calibration_note(of_candidate, targets)
    return Fidelity.from_compared(comparison, reference, candidate, about, {**provenance(), "versions": versions()})


def _is_unquantized(source: "Source") -> bool:
    return not source.packed and source.checkpoint.stored_nbytes == source.checkpoint.nbytes


def _open(place: str, top_k: int, dtype: str, device: str) -> "ComparedModel":
    from diffquant.measure.fidelity.base_file import BaseFile
    from diffquant.measure.fidelity.served import ServedModel

    if place.startswith(_SERVERS):
        return ServedModel(place, top_k)
    if _is_base_file(Path(place)):
        return BaseFile(Path(place))
    return _model(Path(place), dtype, device)


def _is_base_file(file: Path) -> bool:
    """Return whether a file has log-probabilities in llama.cpp's format."""
    from diffquant.measure.fidelity.base_file import MAGIC

    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _model(path: Path, dtype: str, device: str) -> "ComparedModel":
    """Open a checkpoint or an exported folder."""
    from diffquant.checkpoints.source import open_source
    from diffquant.measure.fidelity.models import LocalModel
    from diffquant.measure.torch_model import TorchModel
    from diffquant.onnx.targets import runtime_of
    from diffquant.quantization.loading import load

    runtime = runtime_of(path)
    if runtime is not None:
        described = runtime.describe(path, device)
        about = {"kind": "export", "scheme": described.scheme, **described.identity}
        return LocalModel(path, runtime.open(path, device), about)
    source = open_source(path)
    loaded = load(source, dtype=dtype, device=device)
    about = {
        "kind": "checkpoint",
        "fingerprint": source.fingerprint,
        "recipe": source.recipe.to_dict(),
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }
    return LocalModel(path, TorchModel(loaded, source.tokenizer), about, source)


def _chunks(
    sides: "list[ComparedModel]", text: Path | str | None, characters: int, context: int | None
) -> "tuple[Tensor, JsonObject]":
    """Cut the text into chunks of token ids [N, n], and describe it as plain data.

    Args:
        text, characters, context: as in `fidelity`.
    """
    from diffquant.checkpoints.texts import load_text, text_digest
    from diffquant.measure.fidelity import cut_chunks
    from diffquant.measure.fidelity.models import count_scored_positions
    from diffquant.measure.fidelity.result import count_interval_groups

    about: JsonObject
    longest = {side.name: side.max_chunk_length for side in sides if side.max_chunk_length is not None}
    stored = next((side for side in sides if side.fixed_chunks is not None), None)
    wanted = context if stored is None or stored.fixed_chunks is None else stored.fixed_chunks.shape[1]
    for name, length in longest.items():
        if wanted is not None and wanted > length:
            raise UsageError(
                f"{name} reads chunks of up to {length} tokens, not {wanted}: {option_name('context', length)} fits"
            )
    if stored is not None:
        if (text, context, characters) != (None, None, CHARACTERS):
            raise UsageError(
                f"{stored.name} already contains a text in chunks: leave out {option_name('text')}, "
                f"{option_name('characters')} and {option_name('context')}"
            )
        read, about = "", {"name": f"the text of {stored.name}"}
    else:
        whole = load_text(None if text is None else Path(text))
        read = whole[-characters:] if characters else whole
        name = "the bundled text" if text is None else Path(text).name
        about = {"name": name, "digest": text_digest(read), "characters": len(read)}
    chunks = cut_chunks(sides, read, context or min([CONTEXT, *longest.values()]))
    count, length = chunks.shape
    about |= {
        "context": length,
        "chunks": count,
        "scored": count * count_scored_positions(length),
        "parts": count_interval_groups(count),
    }
    return chunks, about

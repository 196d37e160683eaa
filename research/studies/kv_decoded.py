"""KL per stored byte of low-bit KV caches, read as generation reads them: a prompt at once, then token by token.

    python -m research.studies.kv_decoded MODEL --json research/results/kv-decoded/MODEL.json
    python -m research.studies.kv_decoded --show research/results/kv-decoded/*.json

Weights and logits stay at 16 bits. A window's first tokens are its prompt, and each of the others is scored with what
the cache holds by then: the newest tokens at 16 bits where the recipe keeps a residual, blocks of a scale per channel
once they are full. KL is that of the model's own predictions at 16 bits. Each result is on the disk before the next is
measured.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.tokens import encode_windows
from diffquant.errors import UsageError
from diffquant.measure.scoring import kl_by_position
from diffquant.measure.stats import Difference, mean_interval
from diffquant.measure.sweep.subject import kv_bytes_per_token
from diffquant.measure.torch_model import HiddenStates, TorchModel
from diffquant.model.causal import CausalModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.reports.tables import markdown
from diffquant.support.progress import Progress, progress_for, report_nothing
from research.studies.kv_results import TEXTS, KVResults, settings_of, texts_of
from research.studies.results import read_json

# Length of a cache whose bytes are given beside those of the windows.
LONG = 4096


class CacheForm(NamedTuple):
    """Schemes of a cache.

    Attributes:
        keys, values: schemes as text.
        residual: number of newest tokens that stay at 16 bits.
        keeps_ends: whether the first and the last layer stay at 16 bits.
    """

    keys: str
    values: str
    residual: int = 0
    keeps_ends: bool = False

    @classmethod
    def named(cls, name: str) -> "CacheForm":
        """The cache that has this name.

        Raises:
            UsageError: no cache has it.
        """
        parts = re.fullmatch(r"([\w:]+), ([\w:]+)(?:, residual (\d+))?(, ends 16)?", name)
        if parts is None:
            raise UsageError(f"{name!r} is no cache; write one as '4:c32, 4:row:rotated, residual 64'")
        keys, values, residual, ends = parts.groups()
        return cls(keys, values, int(residual or 0), ends is not None)

    @property
    def name(self) -> str:
        parts = [self.keys, self.values]
        parts += [f"residual {self.residual}"] if self.residual else []
        return ", ".join([*parts, "ends 16"] if self.keeps_ends else parts)

    def recipe(self, layers: int) -> Recipe:
        """The recipe for a model with this many layers."""
        ends = (0, layers - 1) if self.keeps_ends else ()
        overrides = {f"model.layers.{layer}.self_attn.{states}": "16" for layer in ends for states in "kv"}
        return Recipe.of(k=self.keys, v=self.values, residual=self.residual, overrides=overrides)


FORMS = (
    CacheForm("8:row", "8:row"),
    CacheForm("5:c32", "5:row:rotated"),
    CacheForm("4:row", "4:row"),
    CacheForm("4:c32", "4:row"),
    CacheForm("4:c32", "4:row:rotated"),
    CacheForm("4:c32", "4:row:rotated", 32),
    CacheForm("4:c32", "4:row:rotated", 0, True),
    CacheForm("8:c32", "4:row:rotated"),
    CacheForm("4:c32", "8:row:rotated"),
    CacheForm("4:c32", "3:row:rotated"),
    CacheForm("3:c32", "4:row:rotated"),
    CacheForm("4:c32", "4:row:rotated", 64),
    CacheForm("4:c32", "4:row", 32),
    CacheForm("4:row", "4:row:rotated"),
    CacheForm("4:row:rotated", "4:row:rotated"),
    CacheForm("4:row", "4:row", 32),
    CacheForm("8:row", "4:row"),
    CacheForm("4:row", "8:row"),
    CacheForm("4:row", "3:row"),
    CacheForm("3:row", "4:row"),
    CacheForm("4:c32", "4:row:rotated", 32, True),
    CacheForm("6:c32", "6:row:rotated"),
    CacheForm("3:c32", "3:row:rotated"),
)


def main(
    paths: Annotated[list[Path], typer.Argument(help="A checkpoint; with --show, results.")],
    characters: Annotated[int, typer.Option(help="Characters that are read of either text.")] = 24576,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 256,
    scored: Annotated[int, typer.Option(help="Tokens of a window that are scored, behind its prompt.")] = 128,
    batch: Annotated[int, typer.Option(help="Windows that are read together.")] = 64,
    forms: Annotated[
        list[str] | None, typer.Option("--form", help="A cache by its name in the table; all of FORMS without it.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--json", help="Where the numbers are and go.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print results side by side.")] = False,
) -> None:
    """Measure KL per stored byte of low-bit KV caches."""
    if show:
        print(byte_table([read_json(path) for path in paths]))
        return
    if len(paths) != 1 or file is None:
        raise UsageError("give one model and --json, or --show and results")
    if not 1 <= scored < window:
        raise UsageError(f"{scored} of a window's {window} tokens cannot be scored behind a prompt")
    chosen: Sequence[CacheForm] = [CacheForm.named(name) for name in forms] if forms else FORMS
    print(byte_table([measure_forms(paths[0], chosen, characters, window, scored, batch, file, progress_for("kv"))]))


def measure_forms(
    path: Path,
    forms: Sequence[CacheForm],
    characters: int,
    window: int,
    scored: int,
    batch: int,
    file: Path,
    progress: Progress = report_nothing,
) -> dict[str, Any]:
    """Measure caches, writing the file after each; what it holds already is kept.

    Raises:
        UsageError: the file holds results of another model, text or window.
    """
    source = open_source(path)
    model, tokenizer = load(source, Recipe(), torch.float32, "cpu"), source.tokenizer
    texts = texts_of(characters)
    results = KVResults(file, settings_of(source, texts, characters, window=window, scored=scored))
    windows = {name: encode_windows(model, tokenizer, text, window) for name, text in texts.items()}
    todo = [form for form in forms if form.name not in results.rows]
    for number, (form, row) in enumerate(read_caches(model, windows, todo, scored, batch)):
        progress(number + 1, len(todo), form.name)
        results.add(form.name, row)
    return results.to_dict()


def read_caches(
    model: CausalModel, windows: Mapping[str, Tensor], forms: Sequence[CacheForm], scored: int, batch: int
) -> Iterator[tuple[CacheForm, dict[str, Any]]]:
    """Score the last tokens of each text's windows [N, T] with one cache after another; the model has no recipe then.

    Returns:
        each cache with its bytes a token, and by text KL and KL by window, in nats.
    """
    model.apply_recipe(Recipe())
    references = {name: [decoded(model, part, scored) for part in ids.split(batch)] for name, ids in windows.items()}
    for form in forms:
        model.apply_recipe(form.recipe(len(model.model.layers)))
        window = windows["prose"].shape[1]
        lengths = range(window - scored + 1, window + 1)
        row: dict[str, Any] = {
            "bytes": sum(kv_bytes_per_token(model, length) for length in lengths) / scored,
            "bytes_long": kv_bytes_per_token(model, LONG),
        }
        for name, ids in windows.items():
            kl = [
                float(kl_by_position(of_reference, of_cache).mean())
                for part, kept in zip(ids.split(batch), references[name], strict=True)
                for of_reference, of_cache in zip(_each(kept), _each(decoded(model, part, scored)), strict=True)
            ]
            row[name] = {"kl": sum(kl) / len(kl), "kl_by_window": kl}
        yield form, row
    model.apply_recipe(Recipe())


@torch.inference_mode()
def decoded(model: CausalModel, ids: Tensor, scored: int) -> HiddenStates:
    """States [N, scored] after the last tokens of windows [N, T], read one by one behind the others."""
    reader = TorchModel(model)
    cache = reader.new_cache()
    reader.compute_outputs(ids[:, :-scored], cache=cache)
    steps = [reader.compute_outputs(token, cache=cache).values for token in ids[:, -scored:].split(1, 1)]
    return HiddenStates(torch.cat(steps, 1), model.lm_head)


def _each(states: HiddenStates) -> list[HiddenStates]:
    """The states of each window."""
    return [states[index] for index in range(len(states))]


def kl_interval(row: Mapping[str, Any], text: str) -> Difference:
    """Mean KL over a text's windows, with its 95 % interval."""
    return mean_interval(row[text]["kl_by_window"])


def is_beaten(results: Mapping[str, Any], name: str, text: str, size: str) -> bool:
    """Whether another cache has a lower KL in as few bytes, of a window ("bytes") or a long one ("bytes_long")."""
    ours = results[name]
    return any(
        row[size] <= ours[size] and row[text]["kl"] < ours[text]["kl"] for each, row in results.items() if each != name
    )


def byte_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with a row for each model and cache, the smallest of a model first: bytes, and KL on both texts."""
    heads = ["model", "keys, values", "bytes per token", f"in {LONG:,} tokens", "KL, 0.001 nats", "elsewhere"]
    rows = [
        [one["settings"]["model"], name, *byte_cells(one["results"], name)]
        for one in results
        for name in sorted(one["results"], key=lambda name, rows=one["results"]: (rows[name]["bytes"], name))  # type: ignore[misc]
    ]
    return "\n".join(markdown(heads, rows))


def byte_cells(results: Mapping[str, Any], name: str) -> list[str]:
    """Cells of a cache's row after its name; a KL that no cache of as few bytes is below is bold."""
    row = results[name]
    cells = [f"{row['bytes']:,.0f}", f"{row['bytes_long']:,.0f}"]
    for text in TEXTS:
        kl = kl_interval(row, text)
        cell = f"{1000 * kl.mean:.2f} [{1000 * kl.low:.2f}, {1000 * kl.high:.2f}]"
        cells.append(cell if is_beaten(results, name, text, "bytes") else f"**{cell}**")
    return cells


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)

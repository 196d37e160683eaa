"""Implementation of `diffquant search`: measure sensitivities, allocate bit widths, compare on held-out text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffquant.calib.search.allocation import (
    Allocation,
    Budget,
    allocate,
    average_bits,
    require_scipy,
    sort_widths,
    spread_evenly,
)
from diffquant.calib.search.result import INTEGERS, Candidate, Measurement, SearchResult, Width, format_width
from diffquant.calib.search.sensitivity import OneDnnProducts, Sensitivity
from diffquant.calib.search.units import Unit, find_unassigned_units, find_units, to_recipe
from diffquant.checkpoints.calibration import calibration_text
from diffquant.checkpoints.corpora import Sources
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.texts import text_digest
from diffquant.checkpoints.tokens import encode_windows
from diffquant.errors import UsageError
from diffquant.measure.sweep.subject import weight_bytes
from diffquant.measure.task import CHARACTERS_PER_TOKEN
from diffquant.measure.tasks.perplexity import compute_perplexity, compute_reference
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import MODEL_MODULES, load
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.targets import DEFAULT_GRANULARITY
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.installation import list_compute_versions, provenance, result_version_digest
from diffquant.support.names import option_name
from diffquant.support.outputs import Journal
from diffquant.support.progress import Progress, report_nothing

# Increase it if the way a cost is measured changes, so that journals of earlier versions are not resumed.
MEASUREMENT_FORMAT = 4

# Context length in tokens for the comparison of recipes.
_CHECK_WINDOW = 512


class Search:
    """A search for the bit widths of one model's tensors under a size budget.

    Attributes:
        budget: budget of the widths.
        targets: names among "weights", "k", "v" and "logits".
        widths: widths to choose from, the widest first.
        source: checkpoint to search.
        units: tensors that each get a width.
        parts: units that are only measured and get no width; empty unless the constructor's `parts` was true.
        journal: measurements made so far.
    """

    def __init__(
        self,
        path: Path | str | Source,
        budget: Budget,
        output: Path,
        *,
        targets: Sequence[str] = ("weights",),
        widths: Sequence[Width] = (8, 6, 4),
        granularity: str = DEFAULT_GRANULARITY["weights"],
        text: Sources = None,
        windows: int = 8,
        window: int = 256,
        check_characters: int = 16384,
        dtype: str = "float32",
        device: str = "auto",
        parts: bool = False,
    ) -> None:
        """Check all arguments, and open the journal of an interrupted search with the same settings, if there is one.

        Args:
            path: checkpoint to search.
            budget: budget of the widths.
            output: folder of the journal.
            targets: names among "weights", "k", "v" and "logits".
            widths: widths to choose from: integers from 2 to 8 bits, or names of other number formats.
            granularity: granularity of the weights.
            text: files or datasets, as `read_calibration` accepts them; costs are measured on the first half, and
                recipes compared on the second.
            windows: maximum number of windows to measure costs on.
            window: tokens per window.
            check_characters: largest number of characters of the second half to compare recipes on.
            dtype: dtype of the models.
            device: device to run on.
            parts: whether to measure parts of layers too (see `find_unassigned_units`).

        Raises:
            DiffQuantError: the checkpoint, the text, the targets, the widths or the budget are invalid.
        """
        if len(set(widths)) < 2 or not all(
            width in INTEGERS if isinstance(width, int) else format_named(width).quantizes for width in widths
        ):
            raise UsageError(
                f"{option_name('bits')} needs two or more widths between 2 and 8, or names of number formats, got "
                f"{', '.join(map(str, widths))}"
            )
        require_scipy()
        self.budget, self.targets = budget, targets
        self._windows, self._window, self._measures_parts = windows, window, parts
        self._device = resolve_device(device)
        self.source = open_source(path)
        floats = [width for width in widths if not isinstance(width, int)]
        # If integers are among the widths, the result is compared with every uniform integer width.
        self._uniform = (*(INTEGERS if len(floats) < len(widths) else ()), *floats)
        self.units = find_units(self.source, targets, granularity, self._uniform)
        self.parts = find_unassigned_units(self.source, granularity, widths) if parts else []
        self.widths = sort_widths(self.units, list(set(widths)))[::-1]
        budget.check(self.units, self.widths)
        self._tokenizer = self.source.tokenizer
        wanted = 2 * max(2 * CHARACTERS_PER_TOKEN * windows * window, check_characters)
        read = calibration_text(text, self._tokenizer, wanted)
        self._text, self._held_out = read[: len(read) // 2], read[len(read) // 2 :][:check_characters]
        self._dtype = resolve_dtype(dtype, self._device)
        self._key = {
            "format": MEASUREMENT_FORMAT,
            "model": self.source.fingerprint,
            "dtype": str(self._dtype).removeprefix("torch."),
            "text": text_digest(self._text),
            "windows": windows,
            "window": window,
            "device": torch.device(self._device).type,
            "versions": list_compute_versions(self._device),
            "code": result_version_digest((*MODEL_MODULES, __name__)),
        }
        self.journal = Journal(output, self._key)

    @property
    def missing_measurements(self) -> list[tuple[Unit, Width]]:
        """Pairs of unit and width that are not measured yet."""
        return [
            (u, bits)
            for u in [*self.units, *self.parts]
            for bits in self.widths
            if self.journal.get(_measurement_name(u, bits)) is None
        ]

    def estimate_time(self) -> str:
        """Estimate the time of the missing measurements from one forward pass, and return it as a sentence."""
        sensitivity, count = self._sensitivity(), len(self.units) + len(self.parts)
        layers = len(sensitivity.model.model.layers)
        share = sensitivity.seconds / (layers + 1)
        seconds = sum(share * (layers - unit.layer + 1) for unit, _ in self.missing_measurements)
        return (
            f"{count} units at {len(self.widths)} widths: {len(self.missing_measurements)} of "
            f"{count * len(self.widths)} measurements to do, about {seconds / 60:.1f} minutes"
        )

    def run(self, progress: Progress = report_nothing) -> SearchResult:
        """Run the missing measurements, choose the widths, and compare the recipe with others.

        Raises:
            KeyboardInterrupt: the search was interrupted; the message says how to resume it.
            CheckpointError: the checkpoint has changed since it was opened.
        """
        try:
            costs = self._costs(progress)
            chosen = allocate({unit: costs[unit] for unit in self.units}, self.budget)
            perplexity, candidates = self._compare(chosen, costs, progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted: {len(self.journal)} measurements are kept in {self.journal.path}; run the same command "
                "again to resume"
            ) from None
        measured = {
            u: Measurement(
                name=u.name,
                target=u.target,
                layer=u.layer,
                kind=u.kind,
                elements=u.elements,
                kl=by_width,
                chosen=chosen.get(u),
            )
            for u, by_width in costs.items()
        }
        settings = self._key | provenance() | {"held_out": text_digest(self._held_out), "check_window": _CHECK_WINDOW}
        return SearchResult(
            self.source.path.name,
            str(self.budget),
            perplexity,
            candidates,
            [measured[u] for u in self.units],
            to_recipe(chosen),
            settings,
            [measured[u] for u in self.parts] if self._measures_parts else None,
        )

    def _sensitivity(self) -> Sensitivity:
        model = load(self.source, Recipe(), self._dtype, self._device)
        tokens = self._windows * self._window
        return Sensitivity(model, encode_windows(model, self._tokenizer, self._text, self._window, tokens))

    def _costs(self, progress: Progress) -> dict[Unit, dict[Width, float]]:
        if missing := self.missing_measurements:
            sensitivity = self._sensitivity()
            for done, (unit, bits) in enumerate(missing):
                self._record(_measurement_name(unit, bits), sensitivity.measure_cost(unit, bits))
                progress(done + 1, len(missing), f"{unit.name} at {format_width(bits)}")
        return {
            u: {bits: self.journal.get(_measurement_name(u, bits)) for bits in self.widths}
            for u in [*self.units, *self.parts]
        }

    def _record(self, name: str, result: float | dict[str, float]) -> None:
        """Check that the checkpoint has not changed, and add a measurement to the journal."""
        self.source.check_unchanged()
        self.journal.add(name, result)

    def _compare(
        self, chosen: Allocation, costs: dict[Unit, dict[Width, float]], progress: Progress
    ) -> tuple[float, list[Candidate]]:
        """Measure the 16-bit model and the candidates on held-out text; return its perplexity and the candidates."""
        rivals = {"searched": chosen, "spread evenly": spread_evenly(self.units, self.widths, self.budget)}
        rivals |= {f"uniform {bits}": dict.fromkeys(self.units, bits) for bits in self._uniform_widths(chosen)}
        recipes = {name: to_recipe(rival) for name, rival in rivals.items()}
        measured = self._held_out_scores(recipes, progress)
        candidates = []
        for name, rival in rivals.items():
            score = measured[name]
            is_measured = all(bits in costs[unit] for unit, bits in rival.items())
            candidates.append(
                Candidate(
                    name,
                    {target: average_bits(rival, target) for target in self.targets},
                    weight_bytes(self.source, recipes[name]),
                    sum(costs[unit][bits] for unit, bits in rival.items()) if is_measured else None,
                    score["kl"],
                    score["perplexity"],
                )
            )
        return measured["16 bits"]["perplexity"], candidates

    def _uniform_widths(self, chosen: Allocation) -> list[Width]:
        """Return the uniform widths that enclose the chosen ones in size, for every target, ordered by size."""
        widths, below = sort_widths(self.units, self._uniform), list[int]()
        for target in self.targets:
            mean = average_bits(chosen, target)
            uniform = [average_bits(dict.fromkeys(self.units, width), target) for width in widths]
            below.append(max((n for n, stored in enumerate(uniform) if stored <= mean * (1 + 1e-9)), default=0))
        return widths[min(below) : max(below) + 2]

    def _held_out_scores(self, recipes: dict[str, Recipe], progress: Progress) -> dict[str, dict[str, Any]]:
        """Return the KL and perplexity of "16 bits" and of each recipe, from the journal or measured now."""
        compared = {"16 bits": Recipe()} | recipes
        prefix = f"held out {text_digest(self._held_out)} in windows of {_CHECK_WINDOW}"
        names = {name: f"{prefix}: {json.dumps(recipe.to_dict())}" for name, recipe in compared.items()}
        missing = [name for name in compared if self.journal.get(names[name]) is None]
        reference = None
        if missing:
            model = load(self.source, Recipe(), self._dtype, self._device)
            with OneDnnProducts():
                reference = compute_reference(
                    TorchModel(model, self._tokenizer), self._held_out, _CHECK_WINDOW, _CHECK_WINDOW
                )
        for done, name in enumerate(missing):
            progress(done, len(missing), f"comparing {name}")
            model = load(self.source, compared[name], self._dtype, self._device)
            with OneDnnProducts():
                score = compute_perplexity(
                    TorchModel(model, self._tokenizer),
                    self._held_out,
                    _CHECK_WINDOW,
                    _CHECK_WINDOW,
                    reference=reference,
                )
            self._record(names[name], {name: score[name] for name in ("kl", "perplexity")})
        return {name: self.journal.get(names[name]) for name in compared}


def _measurement_name(unit: Unit, width: Width) -> str:
    return f"{unit.name} {unit.scheme(width)}"

"""The grid of a sweep: every model at 16 bits, then every target at every width. No torch here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diffquant.checkpoints.places import DeviceMap, OffloadPlan
from diffquant.errors import UsageError
from diffquant.measure.cells import RECIPE, SweepPoint
from diffquant.measure.task import batch_tokens_on
from diffquant.measure.tasks import check_options, task_class_named, task_kinds, task_options
from diffquant.recipe import Recipe
from diffquant.recipe.targets import DEFAULT_GRANULARITY
from diffquant.support.files import check_distinct
from diffquant.support.names import did_you_mean, find_duplicates
from diffquant.support.plain_data import JsonObject

# Name of the recipe that a quantized folder records; other recipes have their files' names.
OWN = "own"

# The recipe's fields that each target sets.
TARGETS = {
    "weights": ("weights",),
    "kv": ("k", "v"),
    "k": ("k",),
    "v": ("v",),
    "logits": ("logits",),
    "qk": ("qk",),
    "p": ("p",),
    "pv": ("pv",),
    "activations": ("activations",),
}


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep: what to measure, and how.

    Attributes:
        tasks: names of tasks in `diffquant.measure.tasks`, such as "hellaswag" or "needle:4:2".
        bits: bit widths; the 16-bit baseline is always measured.
        targets: names in `TARGETS`; each is quantized alone.
        recipes: YAML files of recipes, each measured unchanged in addition to the grid.
        scales: files of calibrated ranges for static schemes, at most one per model.
        granularities: granularities as in a scheme's text ("row", "tensor", "row:shift"); each is used for the
            targets that support it. Empty: every target's own default.
        task_options: values of the tasks' own options by name, such as {"limit": 100}.
        dtype: "auto", "bfloat16", "float16" or "float32".
        batch_tokens: largest number of tokens per pass; the default depends on the device.
        attention: backend of `diffquant.attention.BACKENDS`, or "auto".
        device: where models run; "auto" takes a CUDA device if there is one, else the CPU.
        device_map, offload_folder: placement of models larger than one device, as in `diffquant.load`.
    """

    tasks: tuple[str, ...] = ("hellaswag",)
    bits: tuple[int, ...] = (16, 8, 6, 4)
    targets: tuple[str, ...] = ("logits",)
    recipes: tuple[Path, ...] = ()
    scales: tuple[Path, ...] = ()
    granularities: tuple[str, ...] = ()
    task_options: Mapping[str, object] = field(default_factory=dict)
    dtype: str = "auto"
    batch_tokens: int | None = None
    attention: str = "auto"
    device: str = "auto"
    device_map: DeviceMap | None = None
    offload_folder: Path | None = None

    def __post_init__(self) -> None:
        wrong = [f"unknown target {t!r}{did_you_mean(t, list(TARGETS))}" for t in self.targets if t not in TARGETS]
        if self.batch_tokens is not None and self.batch_tokens < 1:
            wrong.append(f"batch tokens must be 1 or more, got {self.batch_tokens}")
        if not self.tasks:
            wrong.append(f"no task: give one of {', '.join(sorted(task.usage for task in task_kinds()))}")
        if wrong:
            raise UsageError("; ".join(wrong))
        for name in self.tasks:
            task_class_named(name)
        check_options(self.task_options)
        _ = self.device_placement

    @property
    def device_placement(self) -> OffloadPlan | None:
        """Devices and memories that models are spread over, or None if each model is on one device."""
        return OffloadPlan.of(self.device, self.device_map, self.offload_folder)

    @property
    def computing_device(self) -> str:
        """Name of the device that computes, or "auto" if it is chosen later."""
        return self.device if self.device_placement is None else self.device_placement.device

    def batch_tokens_for(self, device: str) -> int:
        """Return the largest number of tokens per pass, by default one that suits the device."""
        return batch_tokens_on(device) if self.batch_tokens is None else self.batch_tokens

    def to_dict(self) -> JsonObject:
        """Return every option as plain data, including those of the tasks."""
        fields = {name: value for name, value in vars(self).items() if name != "task_options"}
        fields |= {option.name: option.value_in(self.task_options) for option in task_options()}
        return {name: _plain_value(value) for name, value in fields.items()}


def list_points(models: Sequence[Path], options: SweepOptions) -> list[SweepPoint]:
    """List every configuration to measure: for each model 16 bits, then each target from the widest bits down.

    Raises:
        UsageError: no model is given, a model is given twice, or a target, width or granularity is unknown.
    """
    if not models:
        raise UsageError("no model to sweep: give at least one checkpoint")
    check_distinct(models)
    stems = [recipe.stem for recipe in options.recipes]
    if twice := sorted(find_duplicates(stems)):
        raise UsageError(f"recipes need different file names; rename all but one of {', '.join(twice)}")
    if OWN in stems:
        raise UsageError(f"the recipe that a quantized folder records is called {OWN}; rename {OWN}.yaml")
    _check_granularities(options)
    widths = sorted({bits for bits in options.bits if bits != 16}, reverse=True)
    return [point for model in models for point in _points_of(model, widths, options)]


def _points_of(model: Path, widths: list[int], options: SweepOptions) -> Iterator[SweepPoint]:
    yield SweepPoint(model, "", 16, "", Recipe(), model)
    for target in dict.fromkeys(options.targets):
        for granularity in _granularities_of(target, options):
            for bits in widths:
                yield SweepPoint(model, target, bits, granularity, _recipe(target, bits, granularity), model)
    for path in options.recipes:
        yield SweepPoint(model, RECIPE, 0, path.stem, Recipe.read(path), model)


def _recipe(target: str, bits: int, granularity: str) -> Recipe:
    return Recipe.from_dict(dict.fromkeys(TARGETS[target], f"{bits}:{granularity}"))


def _granularities_of(target: str, options: SweepOptions) -> list[str]:
    if not options.granularities:
        return [DEFAULT_GRANULARITY[TARGETS[target][0]]]
    served = [name for name in options.granularities if _why_refused(target, name) is None]
    # The name that cells are stored under, whichever alias was given.
    return list(
        dict.fromkeys(getattr(_recipe(target, 4, name), TARGETS[target][0]).granularity_text for name in served)
    )


def _check_granularities(options: SweepOptions) -> None:
    faults = {
        (target, name): _why_refused(target, name) for target in options.targets for name in options.granularities
    }
    useless = [name for name in options.granularities if all(faults[target, name] for target in options.targets)]
    # If no granularity suits any target, the reasons above are the whole explanation.
    all_useless = len(useless) == len(options.granularities)
    unserved = [] if all_useless else [t for t in options.targets if not _granularities_of(t, options)]
    wrong = [faults[options.targets[0], name] for name in useless]
    wrong += [f"{target}: supports none of {', '.join(options.granularities)}" for target in unserved]
    if wrong:
        raise UsageError("; ".join(dict.fromkeys(fault for fault in wrong if fault)))


def _why_refused(target: str, granularity: str) -> str | None:
    """Return why a target does not support a granularity, or None if it does."""
    try:
        _recipe(target, 4, granularity)
    except UsageError as error:
        return str(error)
    return None


def _plain_value(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value

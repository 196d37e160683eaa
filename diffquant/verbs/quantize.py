"""The verb `quantize`: a checkpoint with its weights packed, and a recipe for its cache and logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard

from diffquant.errors import UnknownModelTypeError, UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.presets import PRESETS
from diffquant.recipe.recipe import names_file
from diffquant.recipe.rounding import NEAREST, RoundingSettings, paths_of
from diffquant.support.names import did_you_mean, option_name
from diffquant.support.progress import Progress, format_duration, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments, paths
from diffquant.verbs.notes import check_push, note_if_transformer, push_folder, say
from diffquant.verbs.recipes import with_a_rule_that_can, with_a_text_if_quick, with_groups_that_fit

if TYPE_CHECKING:
    from diffquant.checkpoints.source import Source
    from diffquant.checkpoints.weight_source import WeightSource
    from diffquant.model.causal import CausalModel
    from diffquant.quantization.plan import QuantizationPlan
    from diffquant.quantization.quantize import Quantization

AnyModel = Annotated["Path | str | Source | WeightSource | CausalModel", kinds.Kind(Path, "MODEL", by_place=True)]
Output = Annotated["Path | str", kinds.Kind(Path, "FOLDER", short="-o")]
# Seconds of work that nobody has to be told of before.
WORTH_SAYING = 2
DEFAULT_RECIPE = "int4"
# What each effort rounds by.
EFFORTS = {"fast": "mse", "balanced": "gptq", "best": "tuned"}
Effort = Annotated[str, kinds.Kind(Literal["fast", "balanced", "best"])]
Rounding = Annotated[str | Mapping[str, Any], kinds.Kind(str, "NAME")]
Format = Annotated[str, kinds.Kind(Literal["gguf"])]
Window = Annotated[int, kinds.Kind(int, "NUMBER", least=2, former="sequence-length")]
Keep = Annotated[str | Sequence[str], kinds.Kind(str, "PATTERN", repeats=True)]


@check_arguments
def quantize(
    model: AnyModel,
    output: Output | None = None,
    recipe: kinds.RecipeFile | None = None,
    *,
    rounding: Rounding | None = None,
    effort: Effort | None = None,
    text: kinds.Texts | None = None,
    tokens: kinds.Tokens | None = None,
    samples: kinds.Count | None = None,
    window: Window | None = None,
    seed: kinds.Seed | None = None,
    weights_only: bool = False,
    keep: Keep = (),
    weight_rules: kinds.File | None = None,
    dtype: kinds.StoredDtype | None = None,
    to: Format | None = None,
    push: kinds.Push | None = None,
    overwrite: bool = False,
    planned: "Callable[[QuantizationPlan], None] | None" = None,
    progress: Progress | None = None,
) -> "Quantization | CausalModel":
    """Quantize a checkpoint's weights, KV cache and logits.

        diffquant quantize model -o model-int4
        diffquant.quantize("model", "model-4bit", {"weights": "4:g32", "kv": 8}, effort="balanced")

    Tensors stream through memory, so a checkpoint may be larger than the memory. The folder has compressed-tensors'
    format. Its recipe records how cache and logits are to be rounded, which happens when the model runs.

    Args:
        model: a checkpoint folder (safetensors), .gguf file, or ORG/NAME[@REVISION] on the Hugging Face hub. In Python
            also an open `Source` or `WeightSource`, or a model that `load` gave: that stays as it is, and comes back
            as another one under the recipe, in memory, to the bit what its folder would give.
        output: folder to create; written atomically. By default the model's name and the preset's, such as
            model-int4, in the current folder. In Python leave it out for a model in memory.
        recipe: a scheme of the weights such as "4:g32", a mapping such as {"weights": "4:g32", "kv": 8}, the name of a
            preset such as "int4", the path of a YAML file, or a `Recipe`. `Recipe` describes its entries. By default
            int4, by gptq if that takes less than 20 minutes here, otherwise by mse.
        rounding: rule from weights to codes. mse, the default, searches each scale for the least squared error;
            nearest takes it from the largest magnitude, as a recipe's file that names no rule has it, and wherever mse
            cannot; gptq also compensates errors over a text; tuned goes on from there by gradients, for the least loss,
            and takes several times as long. In Python also a mapping, as a recipe has it.
        effort: rule by what it takes, in place of `rounding`: fast is mse, balanced gptq, best tuned.
        text: calibration data, as SOURCE or SOURCE=WEIGHT, also called dataset: a file of plain text, a JSONL file with
            texts or with messages of chats, a dataset as ORG/NAME[:CONFIG][:SPLIT], or its folder. Chats take the
            model's chat template. The bundled text by default.
        tokens: number of tokens to read; 16384 by default.
        samples: number of windows to read, in place of `tokens`.
        window: number of tokens in a window, also called sequence length; 512 for gptq and 256 for tuned by default.
        seed: seed of the order of rows in a JSONL file or dataset, and of what tuned draws; 0 by default.
        weights_only: choose weights by their names, whatever the architecture; automatic where the model_type is
            unknown.
        keep: pattern of the names of tensors that are not quantized, beside those that the rules keep.
        weight_rules: YAML file of rules (linears, experts, keep), in place of diffquant's own.
        dtype: dtype of matrices that are not packed: bfloat16, float16 or float32; by default the source's, or bfloat16
            where that is float32.
        to: gguf writes a GGUF file, as `export` does, in place of a checkpoint; output may then be a file, too.
        push: model on the hub to upload the folder to, with its model card.
        overwrite: replace the folder if it exists.
        planned: function called with the plan before anything is written; what it raises ends the run.
        progress: function called with the work done; by default a line on a terminal, one per minute in a log.

    Returns:
        Sizes, and the error of every packed weight; of a model in memory, the quantized one.

    Raises:
        DiffQuantError: anything wrong with the checkpoint, the recipe or the output; nothing is left then.
        KeyboardInterrupt: finished shards are kept, and the message says how to go on.
    """
    from diffquant.calib.calibration.kv_cache import calibrate_cache
    from diffquant.checkpoints.corpora import open_corpora
    from diffquant.quantization.planning import estimated_seconds
    from diffquant.quantization.quantize import quantize as write

    wanted = Recipe.parse(DEFAULT_RECIPE if recipe is None else recipe)
    # Weights at 16 bits, where someone asks for them, make a plain folder of one that another library packed.
    asks_for_weights = isinstance(recipe, Mapping) and "weights" in recipe
    rounding = _chosen_rule(rounding, effort)
    reads = {"text": paths_of(paths(text or ())), "tokens": tokens, "samples": samples, "window": window, "seed": seed}
    # A file or a Recipe says all of itself: without a rule it is nearest, today as when it was written.
    is_whole = names_file(recipe) or isinstance(recipe, Recipe)
    says_all = is_whole or (isinstance(recipe, Mapping) and "rounding" in recipe)
    is_open = rounding is None and not says_all
    wanted = replace(wanted, rounding=_rounding(wanted.rounding, "mse" if is_open else rounding, reads))
    if is_loaded(model):
        on_disk = (output, *reads.values(), weight_rules, dtype, to, push, planned)
        if any(given is not None for given in on_disk) or weights_only or keep or overwrite:
            raise UsageError(
                "a model in memory is quantized in memory, under a recipe alone: leave out output and what else is "
                "about files, or quantize the folder that save_pretrained writes"
            )
        from diffquant.checkpoints.building import memory_source
        from diffquant.quantization.loading import quantize_model

        return quantize_model(model, with_a_rule_that_can(memory_source(model), wanted) if is_open else wanted)
    check_push(push, output or "")
    kept = (keep,) if isinstance(keep, str) else tuple(keep)
    source = _open(model, weights_only, kept, weight_rules)
    if not asks_for_weights and replace(wanted, rounding=NEAREST) == Recipe():
        raise UsageError(f"nothing to quantize: give a recipe, such as {option_name('weights', '4:g32')}")
    if output is None:
        output = _default_output(model, source, recipe, to)
    note_if_transformer(source)
    if recipe is None or (isinstance(recipe, str) and recipe in PRESETS):
        wanted = with_groups_that_fit(source, wanted)
    if is_open:
        wanted = with_a_rule_that_can(source, with_a_text_if_quick(source, wanted) if recipe is None else wanted)
    _note_what_is_missing(source, wanted, asks_for_weights)
    shown = progress or progress_for("quantize")

    def tell(plan: "QuantizationPlan") -> None:
        if plan.schemes and wanted.rounding.text is not None:
            open_corpora(wanted.rounding.text)  # before anything is said of the work
        seconds = estimated_seconds(source, plan) if plan.schemes else 0.0
        if seconds >= WORTH_SAYING:
            say(f"quantize: {len(plan.schemes)} weights by {wanted.rounding.name}, about {format_duration(seconds)}")
        if planned is not None:
            planned(plan)

    if to is None:
        report = write(
            source,
            output,
            wanted,
            dtype=dtype,
            overwrite=overwrite,
            planned=tell,
            calibrate=calibrate_cache,
            progress=shown,
        )
    else:
        report = _as_gguf(source, Path(output), to, overwrite, shown, tell, partial(write, recipe=wanted, dtype=dtype))
    push_folder(output, push)
    return report


def _as_gguf(
    source: "Source | WeightSource",
    output: Path,
    to: str,
    overwrite: bool,
    progress: Progress,
    tell: "Callable[[QuantizationPlan], None]",
    write: "Callable[..., Quantization]",
) -> "Quantization":
    """Write a quantized checkpoint beside the output, make the GGUF file of it, and remove it.

    Raises:
        UsageError: the format is unknown, or weights were chosen by name.
    """
    from diffquant.checkpoints.source import Source
    from diffquant.onnx.gguf.plan import plan_gguf
    from diffquant.onnx.gguf.writer import check_gguf_output, export_gguf

    if to != "gguf" or not isinstance(source, Source):
        raise UsageError(f"{option_name('to', to)}: only a Llama becomes a GGUF file; leave out what chooses by name")
    check_gguf_output(source.path, output, overwrite)

    def check_plan(plan: "QuantizationPlan") -> None:
        plan_gguf(source, schemes=plan.schemes)
        tell(plan)

    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".diffquant-", dir=output.absolute().parent) as folder:
        report = write(source, Path(folder) / output.stem, planned=check_plan, progress=progress)
        made = export_gguf(report.destination, output, overwrite=overwrite, progress=progress)
    notes = (*report.notes, *made.notes)
    return replace(report, destination=made.file, bytes_after=made.bytes_after, notes=notes)


def is_loaded(model: object) -> "TypeGuard[CausalModel]":
    """Return whether a model is one that `load` returned, not a path or name."""
    if isinstance(model, Path | str):
        return False
    from diffquant.model.causal import CausalModel

    return isinstance(model, CausalModel)


def _chosen_rule(rounding: Rounding | None, effort: str | None) -> Rounding | None:
    """Return the rule that is given, by itself or by its effort."""
    if effort is None:
        return rounding
    if rounding is not None:
        raise UsageError(f"{option_name('effort')} chooses the rule; leave out {option_name('rounding')}")
    if effort not in EFFORTS:
        raise UsageError(f"unknown effort {effort!r}{did_you_mean(effort, list(EFFORTS))}")
    return EFFORTS[effort]


def _note_what_is_missing(source: "Source | WeightSource", recipe: Recipe, asks_for_weights: bool) -> None:
    """Say that no weight is quantized, or that the folder will have no tokenizer."""
    from diffquant.checkpoints.tokenizer import has_tokenizer

    is_plain = not any(scheme.quantizes for scheme in (recipe.weights, *recipe.weight_overrides.values()))
    if is_plain and not source.packed and not asks_for_weights:
        say("note: no weight is quantized; this recipe's cache and logits apply where diffquant runs the folder")
    if not has_tokenizer(source.path):
        say(
            f"note: {source.path} has no tokenizer, which reading or generating text needs: copy tokenizer.json into it"
        )


def _default_output(model: AnyModel, source: "Source | WeightSource", recipe: object, to: str | None) -> Path:
    """Return a path in the current folder, made of the model's name and the preset's."""
    name = str(model).partition("@")[0] if isinstance(model, str | Path) else str(source.path)
    suffix = (
        recipe if isinstance(recipe, str) and recipe in PRESETS else DEFAULT_RECIPE if recipe is None else "quantized"
    )
    return Path(f"{Path(name).resolve().name.removesuffix('.gguf')}-{suffix}{'' if to is None else f'.{to}'}")


def _open(
    model: "Path | str | Source | WeightSource",
    weights_only: bool,
    keep: tuple[str, ...],
    rules_file: Path | str | None,
) -> "Source | WeightSource":
    """Open the checkpoint as a known model, or as weights by name if asked or if the model is unknown."""
    from diffquant.checkpoints.source import Source, open_source
    from diffquant.checkpoints.weight_source import WeightRules, WeightSource, open_weights
    from diffquant.model.adapters import is_read

    if isinstance(model, Source | WeightSource):
        return model
    if not (weights_only or keep or rules_file):
        try:
            return open_source(model)
        except UnknownModelTypeError as error:
            say(f"note: {error}; its weights are chosen by name")
    source = open_weights(model, WeightRules.read(None if rules_file is None else Path(rules_file), keep))
    if (keep or rules_file) and not weights_only and is_read(source.checkpoint.config):
        asked = option_name("keep" if keep else "weight_rules")
        say(
            f"note: {asked} chooses weights by their names, as of an architecture that is not known: the folder gets "
            f"no modelling file and records no cache; {option_name('overrides', 'PATTERN=16')} keeps weights of this "
            f"{source.model_type}, too"
        )
    return source


def _rounding(
    settings: RoundingSettings, given: str | Mapping[str, Any] | None, reads: Mapping[str, Any]
) -> RoundingSettings:
    """Return a recipe's rounding with what is given beside it; another rule than the recipe's starts afresh."""
    if given is not None and given != settings.name:
        settings = RoundingSettings.parse(given)
    given_reads = {name: value for name, value in reads.items() if value is not None}
    for name, other in (("tokens", "samples"), ("samples", "tokens")):
        if name in given_reads and other not in given_reads:
            given_reads[other] = None
    return replace(settings, **given_reads)

"""The verb `quantize`: writes a checkpoint with packed weights and a recipe for cache and logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard

from diffquant.errors import UnknownModelTypeError, UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.presets import PRESETS
from diffquant.recipe.recipe import is_recipe_file
from diffquant.recipe.rounding import NEAREST, to_calibration_paths
from diffquant.support.names import did_you_mean, option_name
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, to_path, to_paths
from diffquant.verbs.notes import check_push, note_if_transformer, push_folder, say
from diffquant.verbs.recipes import choose_gptq_if_small, choose_supported_rounding, shrink_groups, update_rounding

if TYPE_CHECKING:
    from diffquant.checkpoints.source import Source
    from diffquant.checkpoints.weight_source import WeightSource
    from diffquant.model.causal import CausalModel
    from diffquant.quantization.plan import QuantizationPlan
    from diffquant.quantization.quantize import QuantizationResult

AnyModel = Annotated["Path | str | Source | WeightSource | CausalModel", kinds.MODEL]
DEFAULT_RECIPE = "int4"
# The rounding that each effort stands for.
EFFORTS = {"fast": "mse", "balanced": "gptq", "best": "tuned"}
Effort = Annotated[str, kinds.Kind(Literal["fast", "balanced", "best"])]
Rounding = Annotated[str | Mapping[str, Any], kinds.Kind(str, "NAME")]
Format = Annotated[str, kinds.Kind(Literal["gguf"])]
Window = Annotated[int, kinds.Kind(int, "NUMBER", least=2, former_name="sequence-length")]
Keep = Annotated[str | Sequence[str], kinds.Kind(str, "PATTERN", is_repeatable=True)]


@check_arguments
def quantize(
    model: AnyModel,
    output: kinds.NewFolder | None = None,
    recipe: kinds.RecipeFile | None = None,
    *,
    rounding: Rounding | None = None,
    effort: Effort | None = None,
    text: kinds.Texts | None = None,
    tokens: kinds.Tokens | None = None,
    samples: kinds.Count | None = None,
    window: Window | None = None,
    seed: kinds.Seed | None = None,
    imatrix: kinds.File | None = None,
    weights_only: bool = False,
    keep: Keep = (),
    weight_rules: kinds.File | None = None,
    dtype: kinds.StoredDtype | None = None,
    to: Format | None = None,
    push: kinds.Push | None = None,
    overwrite: bool = False,
    on_plan: "Callable[[QuantizationPlan], None] | None" = None,
    progress: Progress | None = None,
) -> "QuantizationResult | CausalModel":
    """Quantize a checkpoint's weights, KV cache and logits.

        diffquant quantize model -o model-int4
        diffquant.quantize("model", "model-4bit", {"weights": "4:g32", "kv": 8}, effort="balanced")

    Tensors are streamed, so a checkpoint may be larger than memory. The output is a folder in compressed-tensors
    format. Cache and logits are rounded when the model runs; the folder's recipe records how.

    Args:
        model: a checkpoint folder (safetensors), .gguf file, or ORG/NAME[@REVISION] on the Hugging Face hub. In Python
            also an open `Source` or `WeightSource`, or a model from `load`, which is not changed: the result is then a
            new model in memory, bit for bit the same as the written folder would load.
        output: folder to create; written atomically. By default a folder named after model and preset, such as
            model-int4, in the current folder. In Python leave it out if the model is in memory.
        recipe: a weight scheme such as "4:g32", a mapping such as {"weights": "4:g32", "kv": 8}, the name of a preset
            such as "int4", the path of a YAML file, or a `Recipe`, which describes the entries. The default is int4
            with rounding gptq for up to a billion weights, otherwise mse.
        rounding: rule that rounds weights. mse, the default with a given recipe, searches the scale with the smallest
            squared error. nearest computes the scale from the largest magnitude; it is the default of recipe files,
            and of formats that mse does not support. gptq also compensates errors on calibration data. tuned continues
            with gradient descent and takes several times as long. In Python also a mapping, as in a recipe.
        effort: choose the rule by its running time, instead of `rounding`: fast is mse, balanced gptq, best tuned.
        text: calibration data, as SOURCE or SOURCE=WEIGHT, also called dataset: a file of plain text, a JSONL file with
            texts or with messages of chats, a dataset as ORG/NAME[:CONFIG][:SPLIT], or its folder. Chats are formatted
            with the model's chat template. The bundled text by default.
        tokens: number of tokens to read; 16384 for gptq and 65536 for tuned by default.
        samples: number of windows to read, instead of `tokens`.
        window: number of tokens in a window, also called sequence length; 512 for gptq and 256 for tuned by default.
        seed: seed for shuffling the rows of a JSONL file or dataset, and for rounding tuned; 0 by default.
        imatrix: importance matrix of llama.cpp, as `calibrate` or llama-imatrix writes it (GGUF or the older format),
            by which mse weighs errors.
        weights_only: choose weights by name, for any architecture; automatic if the model_type is unknown.
        keep: name pattern of tensors to leave unquantized, in addition to those that the rules keep.
        weight_rules: YAML file of rules (linears, experts, keep), instead of diffquant's.
        dtype: dtype of matrices that are not quantized: bfloat16, float16 or float32; by default the source's, or
            bfloat16 if that is float32.
        to: gguf writes a GGUF file, like `export`, instead of a checkpoint; output may then be a file.
        push: repository on the hub to upload the folder to, with its model card.
        overwrite: replace the folder if it exists.
        on_plan: function called with the plan before anything is written; an exception in it ends the run.
        progress: function called with the work done; by default a line on a terminal, one per minute in a log.

    Returns:
        Sizes, and the error of every quantized weight; for a model in memory, the quantized model.

    Raises:
        DiffQuantError: the checkpoint, the recipe or the output cannot be used; no output is left.
        KeyboardInterrupt: interrupted; finished files are kept, and the message says how to resume.
    """
    wanted = Recipe.parse(DEFAULT_RECIPE if recipe is None else recipe)
    # Weights at 16 bits, if given, unpack a checkpoint that another library packed.
    asks_for_weights = isinstance(recipe, Mapping) and "weights" in recipe
    rounding = _choose_rule(rounding, effort)
    reads = {
        "text": to_calibration_paths(to_paths(text or ())),
        "tokens": tokens,
        "samples": samples,
        "window": window,
        "seed": seed,
        "imatrix": to_path(imatrix),
    }
    # A file or a `Recipe` without a rounding means nearest, so its results do not depend on the version of diffquant.
    is_complete = is_recipe_file(recipe) or isinstance(recipe, Recipe)
    has_rule = rounding is not None or is_complete or (isinstance(recipe, Mapping) and "rounding" in recipe)
    wanted = replace(wanted, rounding=update_rounding(wanted.rounding, rounding if has_rule else "mse", reads))
    if is_loaded(model):
        on_disk = (output, *reads.values(), weight_rules, dtype, to, push, on_plan)
        if any(given is not None for given in on_disk) or weights_only or keep or overwrite:
            raise UsageError(
                "a model in memory takes only a recipe: leave out output and other options about files, or quantize "
                "the folder that save_pretrained writes"
            )
        from diffquant.checkpoints.building import make_memory_source
        from diffquant.quantization.loading import quantize_model

        return quantize_model(
            model, wanted if has_rule else choose_supported_rounding(make_memory_source(model), wanted)
        )
    needless = [option_name(name) for name, value in reads.items() if value is not None]
    if has_rule and wanted.rounding.name != NEAREST.name:
        needless.append(option_name("rounding" if effort is None else "effort"))
    if needless and not _quantizes_weights(wanted):
        raise UsageError(
            f"leave out {' and '.join(needless)}, or give {option_name('weights', '4:g32')}: only the rounding of "
            "weights uses such options, and this recipe rounds none"
        )
    from diffquant.checkpoints.corpora import open_corpora
    from diffquant.quantization.quantize import quantize as write

    check_push(push, output or "")
    source = _open(model, weights_only, (keep,) if isinstance(keep, str) else tuple(keep), weight_rules)
    if not asks_for_weights and replace(wanted, rounding=NEAREST) == Recipe():
        raise UsageError(f"nothing to quantize: give a recipe, such as {option_name('weights', '4:g32')}")
    if output is None:
        output = _default_output(model, source, recipe, to)
    note_if_transformer(source)
    if recipe is None or (isinstance(recipe, str) and recipe in PRESETS):
        wanted = shrink_groups(source, wanted)
    if not has_rule:
        wanted = choose_supported_rounding(source, choose_gptq_if_small(source, wanted) if recipe is None else wanted)
    _note_what_is_missing(source, wanted, asks_for_weights, has_rule)
    shown = progress or progress_for("quantize")

    def tell(plan: "QuantizationPlan") -> None:
        if plan.schemes and wanted.rounding.text is not None:
            open_corpora(wanted.rounding.text)  # so that its errors come before messages about the work
        if on_plan is not None:
            on_plan(plan)

    make = partial(write, recipe=wanted, dtype=dtype, progress=shown)
    if to is None:
        report = make(source, output, overwrite=overwrite, on_plan=tell, calibrate=_calibrate_cache)
    else:
        report = _as_gguf(source, Path(output), to, overwrite, shown, tell, make)
    push_folder(output, push)
    return report


def _as_gguf(
    source: "Source | WeightSource",
    output: Path,
    to: str,
    overwrite: bool,
    progress: Progress,
    tell: "Callable[[QuantizationPlan], None]",
    make: "Callable[..., QuantizationResult]",
) -> "QuantizationResult":
    """Write a quantized checkpoint into a temporary folder, and convert it to a GGUF file.

    Raises:
        UsageError: the format is unknown, or weights were chosen by name.
    """
    from diffquant.checkpoints.source import Source
    from diffquant.onnx.gguf.plan import plan_gguf
    from diffquant.onnx.gguf.writer import check_gguf_output, export_gguf

    if to != "gguf" or not isinstance(source, Source):
        raise UsageError(f"{option_name('to', to)} writes only Llamas; leave out options that choose weights by name")
    check_gguf_output(source.path, output, overwrite)

    def check_plan(plan: "QuantizationPlan") -> None:
        plan_gguf(source, schemes=plan.schemes)
        tell(plan)

    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".diffquant-", dir=output.absolute().parent) as folder:
        report = make(source, Path(folder) / output.stem, on_plan=check_plan)
        made = export_gguf(report.destination, output, overwrite=overwrite, progress=progress)
    notes = (*report.notes, *made.notes)
    return replace(report, destination=made.file, bytes_after=made.bytes_after, notes=notes)


def is_loaded(model: object) -> "TypeGuard[CausalModel]":
    """Return whether a model is loaded in memory, not a path or name."""
    if isinstance(model, Path | str):
        return False
    from diffquant.model.causal import CausalModel

    return isinstance(model, CausalModel)


def _choose_rule(rounding: Rounding | None, effort: str | None) -> Rounding | None:
    """Return the rule that `rounding` or `effort` names."""
    if effort is None:
        return rounding
    if rounding is not None:
        raise UsageError(f"{option_name('effort')} chooses the rounding rule; leave out {option_name('rounding')}")
    if effort not in EFFORTS:
        raise UsageError(f"unknown effort {effort!r}{did_you_mean(effort, list(EFFORTS))}")
    return EFFORTS[effort]


def _quantizes_weights(recipe: Recipe) -> bool:
    return any(scheme.quantizes for scheme in (recipe.weights, *recipe.weight_overrides.values()))


def _note_what_is_missing(
    source: "Source | WeightSource", recipe: Recipe, asks_for_weights: bool, has_rule: bool
) -> None:
    """Print a note if no weight is quantized, if no rule was chosen and a better one exists, or without a tokenizer."""
    from diffquant.checkpoints.tokenizer import has_tokenizer

    if not _quantizes_weights(recipe) and not source.packed and not asks_for_weights:
        say(
            f"note: no weight is quantized, because the recipe has none: add {option_name('weights', '4:g32')}; its "
            "cache and logits apply only when diffquant runs the folder"
        )
    elif not has_rule and recipe.rounding.name == "mse" and not source.packed and has_tokenizer(source.path):
        say(f"note: rounding by mse; {option_name('effort', 'balanced')} is more accurate and reads a text")
    if not has_tokenizer(source.path):
        say(
            f"note: {source.path} has no tokenizer, which reading or generating text needs: copy tokenizer.json into it"
        )


def _default_output(model: AnyModel, source: "Source | WeightSource", recipe: object, to: str | None) -> Path:
    """Return a path in the current folder, named after the model and the preset."""
    name = str(model).partition("@")[0] if isinstance(model, str | Path) else str(source.path)
    kind = DEFAULT_RECIPE if recipe is None else recipe
    suffix = kind if isinstance(kind, str) and kind in PRESETS else "quantized"
    return Path(f"{Path(name).resolve().name.removesuffix('.gguf')}-{suffix}{'' if to is None else f'.{to}'}")


def _open(
    model: "Path | str | Source | WeightSource",
    weights_only: bool,
    keep: tuple[str, ...],
    rules_file: Path | str | None,
) -> "Source | WeightSource":
    """Open the checkpoint as a known model, or as weights by name if asked or if the model is unknown."""
    from diffquant.checkpoints.source import Source, open_source
    from diffquant.checkpoints.weight_source import PackingRules, WeightSource, open_weights
    from diffquant.model.adapters import has_adapter

    if isinstance(model, Source | WeightSource):
        return model
    if not (weights_only or keep or rules_file):
        try:
            return open_source(model)
        except UnknownModelTypeError as error:
            say(f"note: {error}; its weights are chosen by name")
    source = open_weights(model, PackingRules.read(None if rules_file is None else Path(rules_file), keep))
    if (keep or rules_file) and not weights_only and has_adapter(source.checkpoint.config):
        asked = option_name("keep" if keep else "weight_rules")
        say(
            f"note: with {asked} weights are chosen by name, as for an unknown architecture, so the folder gets no "
            f"modelling file and no cache scheme. diffquant supports {source.model_type}: to keep some weights at 16 "
            f"bits use {option_name('overrides', 'PATTERN=16')} instead"
        )
    return source


def _calibrate_cache(*args: Any, **kwargs: Any) -> Any:
    # Imported where a cache is calibrated, since it imports transformers.
    from diffquant.calib.calibration.kv_cache import calibrate_cache

    return calibrate_cache(*args, **kwargs)

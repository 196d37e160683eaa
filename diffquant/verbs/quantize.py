"""The verb `quantize`: a checkpoint with its weights packed, and a recipe for its cache and logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard, overload

from diffquant.errors import UnknownModelTypeError, UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.recipe import names_file
from diffquant.recipe.rounding import NEAREST, RoundingSettings
from diffquant.support.durations import spoken
from diffquant.support.progress import Progress, progress_for
from diffquant.support.spelling import spelled
from diffquant.support.suggestion import did_you_mean
from diffquant.verbs import kinds
from diffquant.verbs.checked import checked
from diffquant.verbs.hub import at_revision, check_push, push_folder
from diffquant.verbs.notes import note_if_transformer, say
from diffquant.verbs.recipes import chosen_recipe, with_a_rule_that_can

if TYPE_CHECKING:
    from diffquant.model.causal import CausalModel
    from diffquant.quantization.plan import QuantizationPlan
    from diffquant.quantization.quantize import Quantization
    from diffquant.source.source import Source
    from diffquant.source.weight_source import WeightSource

AnyModel = Annotated["Path | str | Source | WeightSource | CausalModel", kinds.Kind(Path, "MODEL", by_place=True)]
Output = Annotated["Path | str", kinds.Kind(Path, "FOLDER", short="-o", is_needed=True)]
# Seconds of work that nobody has to be told of before.
WORTH_SAYING = 2
# What each effort rounds by.
EFFORTS = {"fast": "mse", "balanced": "gptq", "best": "tuned"}
Effort = Annotated[str, kinds.Kind(Literal["fast", "balanced", "best"])]
Rounding = Annotated[str | Mapping[str, Any], kinds.Kind(str, "NAME")]
Keep = Annotated[str | Sequence[str], kinds.Kind(str, "PATTERN", repeats=True)]


@overload
def quantize(
    model: "CausalModel",
    output: None = None,
    recipe: kinds.RecipeFile | None = None,
    *,
    preset: kinds.Preset | None = None,
    weights: kinds.Scheme | None = None,
    kv: kinds.Scheme | None = None,
    k: kinds.Scheme | None = None,
    v: kinds.Scheme | None = None,
    logits: kinds.Scheme | None = None,
    qk: kinds.Scheme | None = None,
    p: kinds.Scheme | None = None,
    pv: kinds.Scheme | None = None,
    like: kinds.Kernel | None = None,
    residual: kinds.Residual | None = None,
    overrides: kinds.Overrides = (),
    rounding: Rounding | None = None,
    effort: Effort | None = None,
) -> "CausalModel": ...


@overload
def quantize(
    model: AnyModel,
    output: Output,
    recipe: kinds.RecipeFile | None = None,
    *,
    preset: kinds.Preset | None = None,
    weights: kinds.Scheme | None = None,
    kv: kinds.Scheme | None = None,
    k: kinds.Scheme | None = None,
    v: kinds.Scheme | None = None,
    logits: kinds.Scheme | None = None,
    qk: kinds.Scheme | None = None,
    p: kinds.Scheme | None = None,
    pv: kinds.Scheme | None = None,
    like: kinds.Kernel | None = None,
    residual: kinds.Residual | None = None,
    overrides: kinds.Overrides = (),
    rounding: Rounding | None = None,
    effort: Effort | None = None,
    text: kinds.File | None = None,
    tokens: kinds.Tokens | None = None,
    weights_only: bool = False,
    keep: Keep = (),
    weight_rules: kinds.File | None = None,
    dtype: kinds.StoredDtype | None = None,
    revision: kinds.Name | None = None,
    push: kinds.Push | None = None,
    overwrite: bool = False,
    planned: "Callable[[QuantizationPlan], None] | None" = None,
    progress: Progress | None = None,
) -> "Quantization": ...


@checked
def quantize(
    model: AnyModel,
    output: Output | None = None,
    recipe: kinds.RecipeFile | None = None,
    *,
    preset: kinds.Preset | None = None,
    weights: kinds.Scheme | None = None,
    kv: kinds.Scheme | None = None,
    k: kinds.Scheme | None = None,
    v: kinds.Scheme | None = None,
    logits: kinds.Scheme | None = None,
    qk: kinds.Scheme | None = None,
    p: kinds.Scheme | None = None,
    pv: kinds.Scheme | None = None,
    like: kinds.Kernel | None = None,
    residual: kinds.Residual | None = None,
    overrides: kinds.Overrides = (),
    rounding: Rounding | None = None,
    effort: Effort | None = None,
    text: kinds.File | None = None,
    tokens: kinds.Tokens | None = None,
    weights_only: bool = False,
    keep: Keep = (),
    weight_rules: kinds.File | None = None,
    dtype: kinds.StoredDtype | None = None,
    revision: kinds.Name | None = None,
    push: kinds.Push | None = None,
    overwrite: bool = False,
    planned: "Callable[[QuantizationPlan], None] | None" = None,
    progress: Progress | None = None,
) -> "Quantization | CausalModel":
    """Quantize a checkpoint's weights, KV cache and logits.

        diffquant quantize model -o model-4bit --preset int4
        diffquant.quantize("model", "model-4bit", {"weights": "4:g32", "kv": 8}, effort="balanced")

    Tensors stream through memory, so a checkpoint may be larger than the memory. The folder has compressed-tensors'
    format. Its recipe records how cache and logits are to be rounded, which happens when the model runs.

    Args:
        model: a checkpoint folder (safetensors), .gguf file, or ORG/NAME[@REVISION] on the Hugging Face hub. In Python
            also an open `Source` or `WeightSource`, or a model that `load` gave: that stays as it is, and comes back
            as another one under the recipe, in memory, to the bit what its folder would give.
        output: folder to create; it appears whole or not at all. In Python none for a model in memory.
        recipe: YAML file of a recipe, in place of the schemes. In Python also a scheme of the weights such as "4:g32",
            a mapping such as {"weights": "4:g32", "kv": 8}, or a `Recipe`.
        preset: name of a recipe. int4: weights 4:g32, known as w4a16. int8: weights 8:row and a KV cache of 8 bits.
            kv-4bit-best: a KV cache of k 4:c32, v 4:row:rotated and residual 64. paper: logits 4:tensor, the fewest
            bits in the DIFF paper's Figure 8.
        weights: scheme of the weights, as FORMAT[:GRANULARITY]: 4:g32, 6:channel, nvfp4 or 16.
        kv: scheme of the KV cache: 8, 4:token, 4:g32 or 16.
        k: scheme of keys, in place of `kv`; 4:c64 has one scale per channel and 64 tokens.
        v: scheme of values, in place of `kv`.
        logits: scheme of attention logits, whose rounding is simulated: 6:row, 4:tensor, 4:row:shift or 16.
        qk: scheme of the queries and keys of Q·Kᵀ, whose rounding is simulated: 8:row, 4:b64:smooth or 16.
        p: scheme of softmax weights before their row's sum divides them, whose rounding is simulated: 8:row, e4m3:row,
            nvfp4 or 16.
        pv: scheme of the values that those weights multiply, beside that of the cache; simulated: e4m3:channel, nvfp4,
            8:g32 or 16.
        like: published kernel whose qk, p and pv are taken, where they are not given: sage2 (int8 and FP8), sage2-int4,
            sage3 (NVFP4), fa3-fp8 or modelopt-nvfp4.
        residual: number of newest tokens of the KV cache that stay 16-bit; none by default.
        overrides: scheme for some weights, or layers' .k, .v, .logits, .qk, .p and .pv: '*.mlp.*=6:row',
            '*.layers.3.*.k=8'; the first match wins. In Python also a mapping from patterns to schemes.
        rounding: rule from weights to codes. mse, the default, searches each scale for the least squared error;
            nearest takes it from the largest magnitude, as a recipe's file that names no rule has it, and wherever mse
            cannot; gptq also compensates errors over a text; tuned goes on from there by gradients, for the least loss,
            and takes several times as long. In Python also a mapping, as a recipe has it.
        effort: rule by what it takes, in place of `rounding`: fast is mse, balanced gptq, best tuned.
        text: text for gptq and tuned; by default the prose that ships.
        tokens: number of tokens of the text to read; 16384 by default.
        weights_only: choose weights by their names, whatever the architecture; automatic where the model_type is
            unknown.
        keep: pattern of the names of tensors that are not quantized, beside those that the rules keep.
        weight_rules: YAML file of rules (linears, experts, keep), in place of diffquant's own.
        dtype: dtype of matrices that are not packed: bfloat16, float16 or float32; by default the source's, or bfloat16
            where that is float32.
        revision: branch, tag or commit of a model on the hub; main by default.
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
    from diffquant.quantization.estimate import estimated_seconds
    from diffquant.quantization.quantize import quantize as write
    from diffquant.text.corpus import load_text

    wanted = chosen_recipe(
        recipe,
        preset,
        weights=weights,
        kv=kv,
        k=k,
        v=v,
        logits=logits,
        qk=qk,
        p=p,
        pv=pv,
        like=like,
        residual=residual,
        overrides=overrides,
    )
    # Weights at 16 bits, where someone asks for them, make a plain folder of one that another library packed.
    if wanted is None or (weights is None and replace(wanted, rounding=NEAREST) == Recipe()):
        ways = ", ".join(map(spelled, ("preset", "weights", "kv", "logits")))
        raise UsageError(
            f"nothing to quantize: give {ways} or {spelled('recipe')}, such as {spelled('preset', 'int4')}"
        )
    rounding = _chosen_rule(rounding, effort)
    # A file or a Recipe says all of itself: without a rule it is nearest, today as when it was written.
    is_whole = names_file(recipe) or isinstance(recipe, Recipe)
    says_all = is_whole or (isinstance(recipe, Mapping) and "rounding" in recipe)
    is_open = rounding is None and not says_all
    wanted = replace(wanted, rounding=_rounding(wanted.rounding, "mse" if is_open else rounding, text, tokens))
    if is_loaded(model):
        on_disk = (output, text, tokens, weight_rules, dtype, revision, push, planned)
        if any(given is not None for given in on_disk) or weights_only or keep or overwrite:
            raise UsageError(
                "a model in memory is quantized in memory, under a recipe alone: leave out output and what else is "
                "about files, or quantize the folder that save_pretrained writes"
            )
        from diffquant.loading import quantized
        from diffquant.source.memory import memory_source

        return quantized(model, with_a_rule_that_can(memory_source(model), wanted) if is_open else wanted)
    if output is None:
        raise UsageError(f"a folder to write to is missing: give {spelled('output')}")
    check_push(push)
    kept = (keep,) if isinstance(keep, str) else tuple(keep)
    source = _opened(at_revision(model, revision), weights_only, kept, weight_rules)
    note_if_transformer(source)
    if is_open:
        wanted = with_a_rule_that_can(source, wanted)
    shown = progress or progress_for("quantize")

    def told(plan: "QuantizationPlan") -> None:
        if plan.schemes and wanted.rounding.text is not None:
            load_text(wanted.rounding.text)  # before anything is said of the work
        seconds = estimated_seconds(source, plan) if plan.schemes else 0.0
        if seconds >= WORTH_SAYING:
            say(f"quantize: {len(plan.schemes)} weights by {wanted.rounding.name}, about {spoken(seconds)}")
        if planned is not None:
            planned(plan)

    report = write(source, output, wanted, dtype=dtype, overwrite=overwrite, planned=told, progress=shown)
    push_folder(output, push)
    return report


def is_loaded(model: object) -> "TypeGuard[CausalModel]":
    """Whether a model is one that `load` gave, and no place where one lies."""
    if isinstance(model, Path | str):
        return False
    from diffquant.model.causal import CausalModel

    return isinstance(model, CausalModel)


def _chosen_rule(rounding: Rounding | None, effort: str | None) -> Rounding | None:
    """The rule that is given, by itself or by its effort."""
    if effort is None:
        return rounding
    if rounding is not None:
        raise UsageError(f"{spelled('effort')} chooses the rule; leave out {spelled('rounding')}")
    if effort not in EFFORTS:
        raise UsageError(f"unknown effort {effort!r}{did_you_mean(effort, list(EFFORTS))}")
    return EFFORTS[effort]


def _opened(
    model: "Path | Source | WeightSource", weights_only: bool, keep: tuple[str, ...], rules_file: Path | str | None
) -> "Source | WeightSource":
    """The checkpoint as a model that is known, or as weights by name where that is asked for or all there is."""
    from diffquant.model.adapters import is_read
    from diffquant.source.source import Source, open_source
    from diffquant.source.weight_rules import WeightRules
    from diffquant.source.weight_source import WeightSource, open_weights

    if isinstance(model, Source | WeightSource):
        return model
    if not (weights_only or keep or rules_file):
        try:
            return open_source(model)
        except UnknownModelTypeError as error:
            say(f"note: {error}; its weights are chosen by name")
    source = open_weights(model, WeightRules.read(None if rules_file is None else Path(rules_file), keep))
    if (keep or rules_file) and not weights_only and is_read(source.checkpoint.config):
        asked = spelled("keep" if keep else "weight_rules")
        say(
            f"note: {asked} chooses weights by their names, as of an architecture that is not known: the folder gets "
            f"no modelling file and records no cache; {spelled('overrides', 'PATTERN=16')} keeps weights of this "
            f"{source.model_type}, too"
        )
    return source


def _rounding(
    settings: RoundingSettings, given: str | Mapping[str, Any] | None, text: Path | str | None, tokens: int | None
) -> RoundingSettings:
    """A recipe's rounding with what is given beside it; another rule than the recipe's starts afresh."""
    if given is not None and given != settings.name:
        settings = RoundingSettings.parse(given)
    return replace(settings, text=Path(text) if text else settings.text, tokens=tokens or settings.tokens)

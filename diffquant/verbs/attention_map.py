"""The verb `attention_map`: how much attention goes to an answer in a context, and how much to noise."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import numbers, path_or_none, paths
from diffquant.verbs.checked import checked
from diffquant.verbs.notes import chosen_device, wrote
from diffquant.verbs.recipes import chosen_recipe

if TYPE_CHECKING:
    from diffquant.calib.analysis.attention_map import AttentionMaps


@checked
def attention_map(
    models: kinds.Models,
    output: kinds.NewFolder | None = None,
    *,
    needles: int = 1,
    lengths: kinds.Numbers = "256",
    samples: int = 50,
    text: kinds.File | None = None,
    logits: kinds.Scheme | None = None,
    recipe: kinds.RecipeFile | None = None,
    dtype: kinds.Name = "auto",
    device: kinds.Name = "auto",
    progress: Progress | None = None,
) -> "AttentionMaps":
    """Measure how much attention goes to an answer and to noise.

        diffquant attention-map transformer diff -o attention
        diffquant.attention_map(["transformer", "diff"], lengths=[256])

    The answer is a number hidden in a context, at several depths.

    Args:
        models: as `sweep` takes them.
        output: folder for attention-map.json and its plot.
        needles: how many numbers a context hides; one is asked for.
        lengths: lengths of needle prompts in tokens, such as 256,1K,4K.
        samples: number of contexts per depth and length.
        text, dtype, device: as `calibrate` takes them.
        logits, recipe: as `quantize` takes them.
        progress: function called with the items done; by default a line on a terminal, one per minute in a log.

    Returns:
        Shares of attention by model, length and depth.

    Raises:
        DiffQuantError: a checkpoint, the text, the recipe or the output do not fit.
    """
    from diffquant.calib.analysis.attention_map import map_attention
    from diffquant.calib.analysis.attention_map_outputs import FILES, write_attention_maps
    from diffquant.evals.protocols.needle import NeedlePlan

    if output is not None:
        FILES.check(Path(output))
    # Of a length that is named twice the items would be the same, and count as twice as many.
    plan = NeedlePlan(needles, 1, tuple(dict.fromkeys(numbers("lengths", lengths, "256,1K,4K"))), samples)
    wanted = chosen_recipe(recipe, logits=logits)
    found = map_attention(
        paths(models),
        plan,
        text=path_or_none(text),
        recipe=wanted,
        dtype=dtype,
        device=chosen_device(device),
        progress=progress or progress_for("attention"),
    )
    if output is not None:
        wrote(write_attention_maps(found, Path(output)))
    return found

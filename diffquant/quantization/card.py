"""Model cards: the README.md of a checkpoint that was quantized or converted."""

from collections.abc import Mapping, Sequence

from diffquant.formats.front_matter import front_matter
from diffquant.formats.reader import Checkpoint
from diffquant.numbers.formats.integer import PACK_QUANTIZED
from diffquant.quantization.plan import QuantizationPlan
from diffquant.scheme import Scheme
from diffquant.support.escaping import markdown_code, markdown_text

# The tag of models that subtract attention maps.
FAMILY = "differential-transformer"


def quantized_card(
    plan: QuantizationPlan,
    errors: Mapping[str, float],
    carries_code: bool,
    replaced: Sequence[str],
    is_differential: bool,
    left_out: Sequence[str] = (),
) -> str:
    """Model card of a quantized checkpoint: what was quantized, how, and how to load it.

    Args:
        errors: relative RMS error of each packed weight, by name.
        carries_code: whether the modelling file is part of the folder.
        replaced: names of the source's files of code that it stands in for.
        is_differential: whether the model is known to subtract attention maps.
        left_out: entries of the source's files that named code, and that the folder's files do not have.
    """
    name, model_type = plan.checkpoint.name, str(plan.checkpoint.config.get("model_type"))
    recipe = plan.recipe
    operands = (("queries and keys", recipe.qk), ("softmax weights", recipe.p), ("values before P·V", recipe.pv))
    lines = [
        front_matter("transformers", _tags(plan, is_differential), plan.checkpoint.front_matter, "quantized"),
        f"# {markdown_text(name)}, quantized\n",
        f"Made from {markdown_code(name)} ({markdown_text(model_type)}) by diffquant, after training.\n",
        "| target | scheme |",
        "|---|---|",
        f"| weights | {recipe.weights} |",
        f"| K cache | {recipe.k} |",
        f"| V cache | {recipe.v} |",
        f"| attention logits | {recipe.logits} |",
        *(f"| {what} | {scheme} |" for what, scheme in operands if scheme.quantizes),
        *(f"| {markdown_code(pattern)} | {scheme} |" for pattern, scheme in recipe.overrides.items()),
        "",
        f"Tensors take {plan.size}.",
        *([f"\n{again[:1].upper()}{again[1:]}."] if plan.schemes and (again := plan.checkpoint.rounded_again) else []),
    ]
    if plan.schemes:
        lines.append(_weights_paragraph(plan, errors, carries_code))
    if replaced:
        files = ", ".join(map(markdown_code, replaced))
        lines.append(f"The source's own code is not part of this folder, which modeling_diffquant.py runs: {files}.\n")
    lines += _left_out(left_out)
    stacked = f"{_EXPERTS}\n" if plan.has_stacked_experts else ""
    lines.append((_NOT_RUN if plan.rules else _RUN) + stacked)
    return "\n".join(lines)


_RUN = """`diffquant.load(path)` gives the model with all of the recipe applied. diffquant.json has each
tensor's bits, error and size.
"""
_EXPERTS = """\
Weights of experts in one tensor are packed along their last axis, as [experts, out, words], and belong to no Linear: a
loader that only replaces Linear modules does not find them, and may go on with random ones."""
_NOT_RUN = """\
The weights were chosen by their names, since diffquant does not run this architecture: **nothing measured
what quantizing did to the model**. A loader needs the architecture's own code, and has to read compressed-tensors.
diffquant.json has the rules, and each tensor's bits, error and size; docs/any-model.md of diffquant says how to decode
a tensor.
"""


def _tags(plan: QuantizationPlan, is_differential: bool) -> list[str]:
    is_standard = plan.schemes and not _own_formats(plan)
    return ["diffquant", *([FAMILY] if is_differential else []), *(["compressed-tensors"] if is_standard else [])]


def _own_formats(plan: QuantizationPlan) -> list[str]:
    """Names of the packed weights' number formats that compressed-tensors does not have."""
    return sorted({scheme.format.name for scheme in plan.schemes.values() if not scheme.format.is_standard})


def converted_card(
    checkpoint: Checkpoint, source_type: str, target_type: str, what: str, left_out: Sequence[str] = ()
) -> str:
    """Model card of a converted checkpoint, which says what it comes from.

    Args:
        left_out: the source's code, and entries that named it, which are not part of the folder.
    """
    name = checkpoint.name
    return "\n".join(
        [
            front_matter("transformers", ["diffquant", FAMILY], checkpoint.front_matter),
            f"# {markdown_text(name)}, as {target_type}\n",
            f"Converted from {markdown_code(name)} ({markdown_text(source_type)}) by diffquant. {what}\n",
            *_left_out(left_out),
        ]
    )


def _left_out(entries: Sequence[str]) -> list[str]:
    named = ", ".join(map(markdown_code, entries))
    return [f"The source's own code is not part of this folder, and nothing names it: {named}.\n"] if entries else []


_BY_CODE = (
    "`AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)` opens it by modeling_diffquant.py, which is "
    "part of this folder and needs transformers, and compressed-tensors for packed weights"
)
_KEPT_ELSEWHERE = (
    "What that format cannot say (cache and logits) stands in config.json under `diffquant_config`, and diffquant "
    "alone applies it."
)


def _loaded_by(plan: QuantizationPlan, carries_code: bool) -> str:
    """The sentence that names the weights' format, and says who reads it."""
    if own := _own_formats(plan):
        return (
            f"The codes of {', '.join(own)} are packed in a layout of diffquant's own, which `diffquant.load` "
            "alone reads; transformers, vLLM and other readers of compressed-tensors refuse this folder.\n"
        )
    if plan.is_as_the_makers:
        return (
            "The layout is that of the makers' own NVFP4 release, experts alone, which their vLLM reads and "
            "`diffquant.load` opens.\n"
        )
    layouts = sorted({scheme.format.layout for scheme in plan.schemes.values()}) or [PACK_QUANTIZED]
    standard = f"The format is compressed-tensors' {' and '.join(layouts)}"
    if plan.rules:
        return f"{standard}.\n"
    match plan.checkpoint.config.get("model_type"):
        case "llama":
            reader = "which transformers loads by itself"
        case "diffllama":
            reader = f"which transformers loads by itself; {_BY_CODE}, too, and then batches of requests are right"
        case _ if carries_code:
            reader = f"and {_BY_CODE}"
        case _:
            reader = "and `AutoModelForCausalLM` opens it after `import diffquant`"
    return f"{standard}, {reader}. {_KEPT_ELSEWHERE}\n"


def _weights_paragraph(plan: QuantizationPlan, errors: Mapping[str, float], carries_code: bool) -> str:
    by_scheme: dict[Scheme, list[float]] = {}
    for tensor in plan.tensors:
        if tensor.scheme.quantizes:
            by_scheme.setdefault(tensor.scheme, []).append(errors[tensor.name])
    parts = [f"{len(e)} weights at {scheme} ({sum(e) / len(e):.2%} mean error)" for scheme, e in by_scheme.items()]
    return (
        f"\nPacked: {', '.join(parts)}; {plan.packed_bits:.2f} stored bits a weight, scales included; rounding: "
        f"{plan.recipe.rounding.name}. {_loaded_by(plan, carries_code)}"
    )

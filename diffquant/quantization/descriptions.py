"""Writes the files that describe quantized weights: config.json, recipe.yaml, diffquant.json and the model card."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffquant.checkpoints.compressed_config import STATIC_CACHE, quantization_config
from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.side_files import format_front_matter
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.weight_source import WeightSource, modules_to_ignore
from diffquant.family.call import dtype_name
from diffquant.quantization.engine_folder import config_for_engines, write_modelling_file
from diffquant.quantization.foreign_code import describe_removed_code, remove_code_entries
from diffquant.quantization.plan import QuantizationPlan
from diffquant.quantization.targets import Motif3Experts
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.numbers.formats.integer import PACK_QUANTIZED
from diffquant.recipe.scheme import Scheme
from diffquant.support.digests import FileDigests
from diffquant.support.files import write_atomically
from diffquant.support.installation import versions
from diffquant.support.terminal import markdown_code, markdown_text

# The tag of models that subtract attention maps.
FAMILY = "differential-transformer"


def quantized_card(
    plan: QuantizationPlan,
    errors: Mapping[str, float],
    modelling_file: str,
    replaced: Sequence[str],
    is_differential: bool,
    left_out: Sequence[str],
) -> str:
    """Return the model card of a quantized checkpoint: what was quantized, how, and how to load it.

    Args:
        errors: relative RMS error of each packed weight, by name.
        modelling_file: name of the folder's modelling file, or "" if there is none.
        replaced: names of the source's code files that the modelling file replaces.
        is_differential: whether the model is known to use differential attention.
        left_out: JSON entries of the source that named code and were removed.
    """
    name, model_type = plan.checkpoint.name, str(plan.checkpoint.config.get("model_type"))
    recipe = plan.recipe
    schemes = {"weights": recipe.weights, "K cache": recipe.k, "V cache": recipe.v, "attention logits": recipe.logits}
    operands = {"inputs of these layers": recipe.activations, "queries and keys": recipe.qk}
    operands |= {"softmax weights": recipe.p, "values before P·V": recipe.pv}
    schemes |= {what: scheme for what, scheme in operands.items() if scheme.quantizes}
    schemes |= {markdown_code(pattern): scheme for pattern, scheme in recipe.overrides.items()}
    tags = _tags(is_differential, bool(plan.schemes) and not _own_formats(plan))
    lines = [
        format_front_matter("transformers", tags, plan.checkpoint.front_matter, "quantized"),
        f"# {markdown_text(name)}, quantized\n",
        f"Made from {markdown_code(name)} ({markdown_text(model_type)}) by diffquant, after training.\n",
        "| target | scheme |",
        "|---|---|",
        *(f"| {what} | {scheme} |" for what, scheme in schemes.items()),
        "",
        f"Tensors take {plan.size_text}.",
    ]
    if plan.schemes and (again := plan.checkpoint.requantization_warning):
        lines.append(f"\n{again[:1].upper()}{again[1:]}.")
    if plan.cache_scales:
        lines.append(_CACHE)
    if plan.schemes:
        lines.append(_weights_paragraph(plan, errors, modelling_file))
    if replaced:
        files = ", ".join(map(markdown_code, replaced))
        lines.append(f"The source's own code is not part of this folder; {modelling_file} replaces {files}.\n")
    lines += _left_out(left_out)
    stacked = f"{_EXPERTS}\n" if plan.has_stacked_experts else ""
    lines.append((_NOT_RUN if plan.rules else _RUN) + stacked)
    lines += [f"{markdown_text(note[:1].upper() + note[1:])}.\n" for note in plan.stock_notes]
    return "\n".join(lines)


_CACHE = """
The cache's calibrated scales are stored with the weights, as compressed-tensors' `kv_cache_scheme`. vLLM uses them to
store keys and values in fp8.
"""
_RUN = """`diffquant.load(path)` loads the model with the whole recipe applied. diffquant.json has each
tensor's bits, error and size.
"""
_EXPERTS = """\
Weights of experts in one tensor are packed along their last axis, as [experts, out, words], and belong to no Linear: a
loader that only replaces Linear modules does not find them, and may use random ones."""
_NOT_RUN = """\
The weights were chosen by their names, because diffquant does not run this architecture: **the effect on the
model's quality was not measured**. A loader needs the architecture's own code, and has to read compressed-tensors.
diffquant.json has the rules, and each tensor's bits, error and size; docs/quantize.md of diffquant explains how to
decode a tensor.
"""


def _tags(is_differential: bool, is_standard: bool = False) -> list[str]:
    return ["diffquant", *([FAMILY] if is_differential else []), *(["compressed-tensors"] if is_standard else [])]


def _own_formats(plan: QuantizationPlan) -> list[str]:
    """Return the names of the plan's number formats that compressed-tensors does not support."""
    return sorted(
        {scheme.format.name for scheme in plan.schemes.values() if not scheme.format.is_in_compressed_tensors}
    )


def _is_decoded_in_bfloat16(plan: QuantizationPlan) -> bool:
    """Return whether compressed-tensors decodes some weights to bfloat16 in a model of any dtype.

    It does so if scales have 8 bits. Products with activations of another dtype then fail.
    """
    formats = {scheme.format for scheme in plan.schemes.values() if scheme.format.is_in_compressed_tensors}
    return any(each.stored_scale_dtype(torch.float32).itemsize == 1 for each in formats)


def converted_card(
    checkpoint: Checkpoint, source_type: str, kind: str, what: str, is_differential: bool, left_out: Sequence[str]
) -> str:
    """Return the model card of a converted checkpoint, with its source.

    Args:
        kind: end of the card's title, after the source's name, such as "as diff_v2".
        what: sentences that describe the conversion.
        is_differential: whether the model uses differential attention.
        left_out: names of the source's code files, and of its JSON entries that named code, that were removed.
    """
    name = checkpoint.name
    return "\n".join(
        [
            format_front_matter("transformers", _tags(is_differential), checkpoint.front_matter),
            f"# {markdown_text(name)}, {kind}\n",
            f"Converted from {markdown_code(name)} ({markdown_text(source_type)}) by diffquant. {what}\n",
            *_left_out(left_out),
        ]
    )


def _left_out(entries: Sequence[str]) -> list[str]:
    named = ", ".join(map(markdown_code, entries))
    return [f"The source's own code is not part of this folder: {named}.\n"] if entries else []


_BY_CODE = (
    "`AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)` opens it with this folder's {}, which needs "
    "transformers, and compressed-tensors for packed weights"
)
_KEPT_ELSEWHERE = (
    "The schemes of cache and logits, which that format cannot store, are in config.json under `diffquant_config`; "
    "only diffquant applies them."
)

_IN_BFLOAT16 = "Its weights are decoded to bfloat16, the dtype in config.json; do not load it in another dtype."
_ADAPTERS = (
    "Packed weights cannot be trained. Adapters (LoRA) can, in a model that was opened with "
    "`quantization_config=CompressedTensorsConfig(run_compressed=False)` or that has run once."
)
_ADAPTERS_OF_MIXED = (
    "Packed weights cannot be trained. Adapters (LoRA) can, in a model that has run once. `run_compressed=False` does "
    "not work here, since transformers (5.24) then decodes all weights by one of their schemes."
)


def _loaded_by(plan: QuantizationPlan, modelling_file: str) -> str:
    """Return a sentence that names the weights' format and the libraries that can load it."""
    if own := _own_formats(plan):
        return (
            f"The codes of {', '.join(own)} are packed in a layout that only `diffquant.load` reads; "
            "transformers, vLLM and other readers of compressed-tensors refuse this folder.\n"
        )
    if plan.has_motif3_layout:
        return (
            "The layout is that of the authors' NVFP4 release, in which only experts are packed; their vLLM port and "
            "`diffquant.load` read it.\n"
        )
    layouts = sorted({scheme.format.layout for scheme in plan.schemes.values()}) or [PACK_QUANTIZED]
    standard = f"The format is compressed-tensors' {' and '.join(layouts)}"
    if plan.rules:
        return f"{standard}.\n"
    model_type = plan.checkpoint.config.get("model_type")
    if model_type != "llama" and not modelling_file:
        return f"{standard}, and `AutoModelForCausalLM` opens it after `import diffquant`. {_KEPT_ELSEWHERE}\n"
    by_code = _BY_CODE.format(modelling_file)
    match model_type:
        case "llama":
            reader = "which transformers loads without diffquant"
        case "diffllama":
            reader = f"which transformers loads without diffquant. {by_code}, and supports padded batches"
        case _:
            reader = f"and {by_code}"
    dtype = f"{_IN_BFLOAT16} " if _is_decoded_in_bfloat16(plan) else ""
    adapters = _ADAPTERS if len(set(plan.schemes.values())) == 1 else _ADAPTERS_OF_MIXED
    return f"{standard}, {reader}. {dtype}{adapters} {_KEPT_ELSEWHERE}\n"


def _weights_paragraph(plan: QuantizationPlan, errors: Mapping[str, float], modelling_file: str) -> str:
    by_scheme: dict[Scheme, list[float]] = {}
    for tensor in plan.tensors:
        if tensor.scheme.quantizes:
            by_scheme.setdefault(tensor.scheme, []).append(errors[tensor.name])
    parts = [f"{len(e)} weights at {scheme} ({sum(e) / len(e):.2%} mean error)" for scheme, e in by_scheme.items()]
    return (
        f"\nPacked: {', '.join(parts)}; {plan.packed_bits:.2f} stored bits per weight, scales included; rounding: "
        f"{plan.recipe.rounding.name}. {_loaded_by(plan, modelling_file)}"
    )


def write_descriptions(
    plan: QuantizationPlan,
    source: Source | WeightSource,
    rounding: Mapping[str, Any],
    records: Mapping[str, Mapping[str, Any]],
    errors: Mapping[str, float],
    folder: Path,
) -> tuple[str, ...]:
    """Write config.json, recipe.yaml, diffquant.json, the model card, and the modelling file if that can run the model.

    Args:
        rounding: name and other identifying settings of the rounding.
        records: record of each weight file written, by file name.
        errors: relative RMS error of each packed weight, by name.
        folder: output folder, which already contains the weights and the files copied from the source.

    Returns:
        Messages about code of the source that was left out.
    """
    recorded = plan.recipe.to_config()
    if plan.run_dtype is not None:
        recorded["dtype"] = dtype_name(plan.run_dtype)
    if not plan.schemes and plan.checkpoint.earlier_format:
        # Lets a command that rounds these weights again warn about it.
        recorded["rounded_as"] = plan.checkpoint.earlier_format
    if plan.checkpoint.scaled_on:
        recorded["scaled_on"] = plan.checkpoint.scaled_on
    config, left_out = remove_code_entries(folder, plan.checkpoint.output_config | {"diffquant_config": recorded})
    if isinstance(source, Source) and source.has_only_cache_scales:
        # Those scales are not copied.
        del config["quantization_config"]
    # Programs that read this layout run the authors' code, so the folder gets no modelling file of diffquant's.
    adapter = source.adapter if isinstance(source, Source) and not plan.has_motif3_layout else None
    if adapter is not None:
        config = config_for_engines(config, adapter)
    carried = {file.name for file in folder.glob("*.py")}
    code = write_modelling_file(folder, config, adapter)
    replaced = sorted(carried - {file.name for file in folder.glob("*.py")})
    if plan.has_motif3_layout:
        config["quantization_config"] = {
            "quant_method": Motif3Experts.method,
            "group_size": format_named("nvfp4").block,
            "produced_by": f"diffquant {versions()['diffquant']}",
        }
    elif plan.schemes or plan.cache_scales:
        ignored = modules_to_ignore(plan.rules) if plan.rules else ()
        config["quantization_config"] = quantization_config(
            plan.written_schemes, plan.written_linears, ignored, plan.written_inputs
        )
        if plan.cache_scales:
            config["quantization_config"]["kv_cache_scheme"] = STATIC_CACHE
        if _is_decoded_in_bfloat16(plan):
            config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": "bfloat16"}
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_atomically(folder / "recipe.yaml", plan.recipe.to_yaml())
    record = _make_record(plan, records, errors) | {"rounding": rounding} | ({"code": code} if code else {})
    write_atomically(folder / "diffquant.json", json.dumps(record, indent=2) + "\n")
    is_differential = isinstance(source, Source) and source.spec.maps > 1
    card = quantized_card(plan, errors, "".join(code), replaced, is_differential, left_out)
    write_atomically(folder / "README.md", card)
    return describe_removed_code([*left_out, *replaced], folder)


def _make_record(
    plan: QuantizationPlan, records: Mapping[str, Mapping[str, Any]], errors: Mapping[str, float]
) -> dict[str, Any]:
    """Return the content of diffquant.json: sizes, errors and digests per tensor and file, which `verify` can check."""
    files = plan.checkpoint.weight_files()
    return {
        "versions": versions(),
        "recipe": plan.recipe.to_dict(),
        **({"rules": plan.rules.to_dict()} if plan.rules else {}),
        "bytes": plan.bytes_after,
        "weights": plan.weight_count,
        "packed_bits": round(plan.packed_bits, 4),
        "source": {
            "bytes": plan.bytes_before,
            **FileDigests({f.name: r["source_digest"] for f, r in zip(files, records.values(), strict=True)}).to_dict(),
        },
        **FileDigests({name: record["digest"] for name, record in records.items()}).to_dict(),
        "tensors": {
            tensor.name: {
                **({"format": number.name} if number.integer_refusal else {"bits": number.bits}),
                "granularity": tensor.scheme.granularity_text,
                "stored_bytes": tensor.stored_bytes,
                "stored_bits": round(tensor.stored_bits, 4),
                "relative_rms_error": errors[tensor.name],
            }
            for tensor in plan.packed
            for number in [tensor.scheme.format]
        },
    }

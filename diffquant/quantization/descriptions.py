"""The files beside quantized weights that say what they are."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.formats.compressed_config import quantization_config
from diffquant.numbers.formats import format_named
from diffquant.quantization.card import quantized_card
from diffquant.quantization.parts import MakersExperts
from diffquant.quantization.plan import QuantizationPlan
from diffquant.serve.folder import config_for_engines, write_modelling_file
from diffquant.serve.foreign_code import leave_out_code
from diffquant.source.source import Source
from diffquant.source.tokenizer import load_tokenizer
from diffquant.source.weight_rules import modules_to_ignore
from diffquant.source.weight_source import WeightSource
from diffquant.support.digests import FileDigests
from diffquant.support.escaping import one_line
from diffquant.support.files import write_atomically
from diffquant.support.versions import versions


def write_descriptions(
    plan: QuantizationPlan,
    source: Source | WeightSource,
    rounding: Mapping[str, Any],
    records: Mapping[str, Mapping[str, Any]],
    errors: Mapping[str, float],
    folder: Path,
) -> tuple[str, ...]:
    """Write config.json, recipe.yaml, diffquant.json, the model card and what engines need.

    Args:
        rounding: name of the rule that made the codes, and what else tells it apart.
        records: records of the files written, by name.
        errors: relative RMS error of each packed weight, by name.
        folder: folder that holds the weights already, and the files that are copied beside them.

    Returns:
        Sentences for people, about code of the source's that was left out.
    """
    recorded = plan.recipe.to_config()
    if plan.run_dtype is not None:
        recorded["dtype"] = str(plan.run_dtype).removeprefix("torch.")
    if not plan.schemes and plan.checkpoint.rounded_as:
        # A verb that rounds these weights again can say so.
        recorded["rounded_as"] = plan.checkpoint.rounded_as
    config, left_out = leave_out_code(folder, plan.checkpoint.written_config | {"diffquant_config": recorded})
    adapter = source.adapter if isinstance(source, Source) else None
    if adapter is not None:
        config = config_for_engines(config, adapter)
    carried = {file.name for file in folder.glob("*.py")}
    code = write_modelling_file(folder, config, adapter)
    replaced = sorted(carried - code.keys()) if code else []
    if plan.is_as_the_makers:
        config["quantization_config"] = {
            "quant_method": MakersExperts.method,
            "group_size": format_named("nvfp4").block,
            "produced_by": f"diffquant {versions()['diffquant']}",
        }
    elif plan.schemes:
        ignored = modules_to_ignore(plan.rules) if plan.rules else ()
        config["quantization_config"] = quantization_config(plan.written_schemes, plan.written_linears, ignored)
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_atomically(folder / "recipe.yaml", plan.recipe.to_yaml())
    account = _account(plan, records, errors) | {"rounding": rounding} | ({"code": code} if code else {})
    write_atomically(folder / "diffquant.json", json.dumps(account, indent=2) + "\n")
    is_differential = isinstance(source, Source) and source.spec.maps > 1
    card = quantized_card(plan, errors, bool(code), replaced, is_differential, left_out)
    write_atomically(folder / "README.md", card)
    return note_left_out([*left_out, *replaced], folder)


def note_left_out(left_out: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Sentences for people about code of the source's that is not part of a folder.

    Args:
        left_out: files, and entries of files that named code.
        folder: folder as it was written, whose tokenizer may have needed them.
    """
    if not left_out:
        return ()
    notes = [f"left out, as code of the source's or the name of some: {', '.join(map(one_line, left_out))}"]
    if any(entry.endswith(" of tokenizer_config.json") for entry in left_out):
        try:
            load_tokenizer(folder)
        except CheckpointError as error:
            why = str(error).removeprefix(f"cannot read a tokenizer from {folder}: ")
            notes.append(f"the tokenizer does not open without what was left out: {why}")
    return tuple(notes)


def _account(
    plan: QuantizationPlan, records: Mapping[str, Mapping[str, Any]], errors: Mapping[str, float]
) -> dict[str, Any]:
    """The content of diffquant.json: of each tensor and file, what can be checked later."""
    files = plan.checkpoint.weight_files()
    return {
        "versions": versions(),
        "recipe": plan.recipe.to_dict(),
        **({"rules": plan.rules.to_dict()} if plan.rules else {}),
        "bytes": plan.bytes_after,
        "weights": plan.weights,
        "packed_bits": round(plan.packed_bits, 4),
        "source": {
            "bytes": plan.bytes_before,
            **FileDigests({f.name: r["source_digest"] for f, r in zip(files, records.values(), strict=True)}).to_dict(),
        },
        **FileDigests({name: record["digest"] for name, record in records.items()}).to_dict(),
        "tensors": {
            tensor.name: {
                **tensor.scheme.format.account(),
                "granularity": tensor.scheme.granularity_text,
                "stored_bytes": tensor.stored_bytes,
                "stored_bits": round(tensor.stored_bits, 4),
                "relative_rms_error": errors[tensor.name],
            }
            for tensor in plan.packed
        },
    }

"""Compares contestants' generated tokens with those of torch and of the float32 export, in a table."""

from statistics import median
from typing import Any

from diffquant.reports.tables import align_columns


def compare_with_torch(row: dict[str, Any], torch: dict[str, Any]) -> None:
    """Add to a row its medians, torch's numbers, the ratios to them, and how many leading tokens are like torch's."""
    for what in ("decode", "prefill"):
        row[f"{what}_median"] = median(row[what])
        row[f"{what}_of_torch"] = median(row[what]) / median(torch[what])
    for size, speeds in row.get("batches", {}).items():
        for what in ("decode", "prefill"):
            speeds[f"{what}_median"] = median(speeds[what])
            speeds[f"{what}_of_torch"] = median(speeds[what]) / median(torch["batches"][size][what])
    row["torch"] = {what: torch[what] for what in ("decode", "prefill", "peak_bytes", "batches") if what in torch}
    if row["peak_bytes"]:
        row["peak_of_torch"] = row["peak_bytes"] / torch["peak_bytes"]
    if row["tokens"]:
        same = [a == b for a, b in zip(row["tokens"], torch["tokens"], strict=True)]
        row["same_tokens"] = [*same, False].index(False)


def compare_with_export(rows: dict[str, dict[str, Any]], float_export: str) -> None:
    """Add to each row its share of the float32 export's folder and memory, where that was measured."""
    reference = rows.get(float_export, {})
    for row in rows.values():
        if reference.get("folder_bytes") and row.get("folder_bytes"):
            row["folder_of_export"] = row["folder_bytes"] / reference["folder_bytes"]
        if reference.get("peak_bytes") and row.get("peak_bytes"):
            row["peak_of_export"] = row["peak_bytes"] / reference["peak_bytes"]


def table(model: str, rows: dict[str, Any]) -> str:
    """Text with a line for each contestant: medians, their spread, and their shares of torch's and the export's."""
    columns = ["decode tokens/s", "of torch", "prefill tokens/s", "of torch", "folder MB", "of f32", "peak MB"]
    head = [model, *columns, "of torch", "of f32", "same tokens", "written in s", "with MB", "kernels"]
    lines = []
    for name, row in rows.items():
        if "missing" in row:
            continue
        speeds = []
        for what in ("decode", "prefill"):
            speeds.append(f"{row[f'{what}_median']:.1f} ({min(row[what]):.1f}-{max(row[what]):.1f})")
            speeds.append(f"{row[f'{what}_of_torch']:.2f}")
        folder = [_text(row, "folder_bytes", 1e-6, ".0f"), _text(row, "folder_of_export", 1, ".3f")]
        peak = [_text(row, "peak_bytes", 1e-6, ".0f")]
        peak += [_text(row, what, 1, ".2f") for what in ("peak_of_torch", "peak_of_export")]
        written = [_text(row, "write_seconds", 1, ".1f"), _text(row, "write_anonymous_bytes", 1e-6, ".0f")]
        lines.append(
            [name, *speeds, *folder, *peak, str(row.get("same_tokens", "-")), *written, row.get("kernels", "-")]
        )
    batches = [
        f"{name}, {size} at once: decode {speeds['decode_median']:.1f} tokens/s, prefill {speeds['prefill_median']:.1f}"
        for name, row in rows.items()
        for size, speeds in row.get("batches", {}).items()
    ]
    missing = [f"{name}: none, {row['missing']}" for name, row in rows.items() if "missing" in row]
    return "\n".join([*align_columns(head, lines), *batches, *missing])


def _text(row: dict[str, Any], what: str, factor: float, spec: str) -> str:
    return "-" if row.get(what) is None else format(row[what] * factor, spec)

"""The commands whose output is kept, each with the checkpoints that it reads."""

from dataclasses import dataclass

from tests.golden.sources import RANDOM


@dataclass(frozen=True)
class Case:
    """One command line, run in an empty folder that holds its sources.

    Attributes:
        name: name of the golden.
        command: words after `diffquant`.
        sources: checkpoints in the folder, by name.
        is_exact: whether every processor writes the same bits. Where a model runs, products are summed in another order
            elsewhere, so numbers are compared within a hundredth, tensors by their shapes; such runs round to 8 bits,
            where a code that flips moves no item.
        before: commands that make what this one reads, such as the folder that `export` quantizes first.
    """

    name: str
    command: str
    sources: tuple[str, ...]
    is_exact: bool = True
    before: tuple[str, ...] = ()


_SCHEMES = {
    "int4-g32": "--weights 4:g32 --kv 8 --logits 6:row:shift",
    "int8-row": "--weights 8:row --k 4:c32 --v 4:row:rotated --residual 64",
    "int6-tensor": "--weights 6:tensor --logits 8:pair",
    "int3-g32": "--weights 3:g32 --override *.mlp.*=8:row",
    "int5-row": "--preset paper",
    "int2-g16": "--weights 2:g16 --override *.layers.0.*=16",
}
_MADE = "quantize needle-diff-v1 -o made --weights 4:g32 --rounding nearest"
_QUICK = "--device cpu --dtype float32"

CASES = [
    *(
        Case(f"quantize-{name}", f"quantize {name} -o out --weights 4:row --rounding nearest", (name,))
        for name in RANDOM
    ),
    Case("quantize-gguf", "quantize llama.gguf -o out --weights 8:row --rounding nearest", ("llama.gguf",)),
    *(
        Case(f"quantize-{name}", f"quantize needle-diff-v1 -o out {options} --rounding nearest", ("needle-diff-v1",))
        for name, options in _SCHEMES.items()
    ),
    *(
        Case(
            f"quantize-{rule}",
            f"quantize needle-diff-v1 -o out --weights 4:g32 --rounding {rule}",
            ("needle-diff-v1",),
            is_exact=False,
        )
        for rule in ("mse", "gptq")
    ),
    Case("convert-diff-v2", "convert llama -o out --to diff-v2", ("llama",)),
    Case("convert-diffllama", "convert unilm-v1-plain -o out --to diffllama", ("unilm-v1-plain",)),
    *(Case(f"inspect-{name}", f"inspect {name} --json", (name,)) for name in (*RANDOM, "llama.gguf")),
    *(
        Case(f"export-{name}", f"export {name} -o out", (name,))
        for name in ("needle-transformer", "needle-diff-v2", "diffllama", "motif-grouped", "gated")
    ),
    Case("export-int4", "export made -o out", ("needle-diff-v1",), before=(_MADE,)),
    Case("export-kv8", "export needle-diff-v1 -o out --weights 4:g32 --kv 8 --embed 8", ("needle-diff-v1",), False),
    Case("export-logits", "export needle-diff-v1 -o out --logits 4:tensor", ("needle-diff-v1",)),
    Case("export-no-cache", "export needle-diff-v2 -o out --no-cache --dtype float16", ("needle-diff-v2",)),
    Case(
        "calibrate",
        f"calibrate needle-diff-v1 -o out.safetensors --tokens 512 --window 128 {_QUICK}",
        ("needle-diff-v1",),
        False,
    ),
    Case(
        "search",
        f"search needle-diff-v1 -o out --budget 5.5 --windows 2 --window 64 --characters 2048 {_QUICK}",
        ("needle-diff-v1",),
        False,
    ),
    Case(
        "sweep",
        "sweep needle-diff-v1 needle-transformer -o out --task perplexity,needle --target logits --bits 8 "
        f"--granularity tensor,row:shift --limit 4 --characters 2048 --window 128 --stride 64 --lengths 96 {_QUICK}",
        ("needle-diff-v1", "needle-transformer"),
        False,
    ),
    Case(
        "sweep-export",
        "sweep made -o out --task needle --limit 4 --lengths 96 --device cpu",
        ("needle-diff-v1",),
        False,
        before=("export needle-diff-v1 -o made --weights 8:row",),
    ),
    Case(
        "eval",
        f"eval needle-diff-v1 --weights 8:row --task hellaswag --limit 4 --json {_QUICK}",
        ("needle-diff-v1",),
        False,
    ),
    Case(
        "outliers",
        f"outliers needle-diff-v1 needle-transformer -o out --tokens 512 --window 128 {_QUICK}",
        ("needle-diff-v1", "needle-transformer"),
        False,
    ),
    Case(
        "generate",
        f"generate needle-diff-v1 --weights 8:row --prompt city-12=45678; --max-new-tokens 12 {_QUICK}",
        ("needle-diff-v1",),
        False,
    ),
    Case("run", "run exported --prompt city-12=45678; --max-new-tokens 12 --threads 1 --json", ("exported",), False),
    Case(
        "compare", "compare 'swept@needle-transformer 16' 'swept@needle-transformer logits 4:tensor' --json", ("swept",)
    ),
    Case("report", "report swept", ("swept",)),
    Case(
        "recipe",
        "quantize needle-diff-v1 -o out --recipe recipe-5.5-bits.yaml",
        ("needle-diff-v1", "recipe-5.5-bits.yaml"),
    ),
    Case(
        "scales",
        f"eval needle-diff-v1 --task perplexity --characters 2048 --window 128 --stride 64 --kv 8:static "
        f"--scales scales.safetensors --json {_QUICK}",
        ("needle-diff-v1", "scales.safetensors"),
        False,
    ),
    Case("eval-export", "eval exported --task needle --lengths 96 --limit 4 --json --device cpu", ("exported",), False),
]

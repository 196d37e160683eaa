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


_ROUNDED = "quantize needle-diff-v1 -o out --rounding"
_MADE = "quantize needle-diff-v1 -o made --weights 4:g32 --rounding nearest"
_QUICK = "--device cpu --dtype float32"
_NEEDLE, _PAIR = "needle-diff-v1", "needle-diff-v1 needle-transformer"
# NAME | sources | command | commands before it. A tilde stands before what is not exact.
_TABLE = f"""
quantize-gguf | llama.gguf | quantize llama.gguf -o out --weights 8:row --rounding nearest
quantize-int4-g32 | {_NEEDLE} | {_ROUNDED} nearest --weights 4:g32 --kv 8 --logits 6:row:shift
quantize-int8-row | {_NEEDLE} | {_ROUNDED} nearest --weights 8:row --k 4:c32 --v 4:row:rotated --residual 64
quantize-int6-tensor | {_NEEDLE} | {_ROUNDED} nearest --weights 6:tensor --logits 8:pair
quantize-int3-g32 | {_NEEDLE} | {_ROUNDED} nearest --weights 3:g32 --override *.mlp.*=8:row
quantize-int5-row | {_NEEDLE} | {_ROUNDED} nearest --preset paper
quantize-int2-g16 | {_NEEDLE} | {_ROUNDED} nearest --weights 2:g16 --override *.layers.0.*=16
~quantize-mse | {_NEEDLE} | {_ROUNDED} mse --weights 4:g32
~quantize-gptq | {_NEEDLE} | {_ROUNDED} gptq --weights 4:g32
convert-diff-v2 | llama | convert llama -o out --to diff-v2
convert-diffllama | unilm-v1-plain | convert unilm-v1-plain -o out --to diffllama
export-int4 | {_NEEDLE} | export made -o out | {_MADE}
~export-kv8 | {_NEEDLE} | export needle-diff-v1 -o out --weights 4:g32 --kv 8 --embed 8
export-logits | {_NEEDLE} | export needle-diff-v1 -o out --logits 4:tensor
export-no-cache | needle-diff-v2 | export needle-diff-v2 -o out --no-cache --dtype float16
~calibrate | {_NEEDLE} | calibrate needle-diff-v1 -o out.safetensors --tokens 512 --window 128 {_QUICK}
~search | {_NEEDLE} | search needle-diff-v1 -o out --budget 5.5 --windows 2 --window 64 --characters 2048 {_QUICK}
~sweep | {_PAIR} | sweep {_PAIR} -o out --task perplexity,needle --target logits --bits 8 \
--granularity tensor,row:shift --limit 4 --characters 2048 --window 128 --stride 64 --lengths 96 {_QUICK}
~sweep-export | {_NEEDLE} | sweep made -o out --task needle --limit 4 --lengths 96 --device cpu \
| export needle-diff-v1 -o made --weights 8:row
~eval | {_NEEDLE} | eval needle-diff-v1 --weights 8:row --task hellaswag --limit 4 --json {_QUICK}
~outliers | {_PAIR} | outliers {_PAIR} -o out --tokens 512 --window 128 {_QUICK}
~generate | {_NEEDLE} | generate needle-diff-v1 --weights 8:row --prompt city-12=45678; --max-new-tokens 12 {_QUICK}
~run | exported | run exported --prompt city-12=45678; --max-new-tokens 12 --threads 1 --json
compare | swept | compare 'swept@needle-transformer 16' 'swept@needle-transformer logits 4:tensor' --json
report | swept | report swept
recipe | {_NEEDLE} recipe-5.5-bits.yaml | quantize needle-diff-v1 -o out --recipe recipe-5.5-bits.yaml
~scales | {_NEEDLE} scales.safetensors | eval needle-diff-v1 --task perplexity --characters 2048 --window 128 \
--stride 64 --kv 8:static --scales scales.safetensors --json {_QUICK}
~eval-export | exported | eval exported --task needle --lengths 96 --limit 4 --json --device cpu
"""


def _read(line: str) -> Case:
    name, sources, command, *before = line.split(" | ")
    return Case(name.removeprefix("~"), command, tuple(sources.split()), name[0] != "~", tuple(before))


CASES = [
    *(
        Case(f"quantize-{name}", f"quantize {name} -o out --weights 4:row --rounding nearest", (name,))
        for name in RANDOM
    ),
    *(Case(f"inspect-{name}", f"inspect {name} --json", (name,)) for name in (*RANDOM, "llama.gguf")),
    *(
        Case(f"export-{name}", f"export {name} -o out", (name,))
        for name in ("needle-transformer", "needle-diff-v2", "diffllama", "motif-grouped", "gated")
    ),
    *map(_read, _TABLE.split("\n")[1:-1]),
]

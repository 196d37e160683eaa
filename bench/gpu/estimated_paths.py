"""The paths that are estimated, of the 3B model's attention and linear layers, and the aims they are held to."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil

import torch
from torch import Tensor

from diffquant.bench.contest import kernels
from diffquant.bench.contest.decode import RECIPES
from diffquant.bench.contest.workloads import Workload, differential, model_named
from diffquant.bench.gpu import estimated_latents
from diffquant.bench.gpu.compiling import Launch
from diffquant.bench.gpu.estimate import (
    CUDNN,
    FLASH_2,
    Path,
    Work,
    attention_seconds,
    compiled,
    estimate,
    report,
    tile_steps,
)
from diffquant.bench.gpu.groups import Aim
from diffquant.bench.gpu.hopper import (
    ASSUMPTIONS,
    CARDS,
    CLOCK_HZ,
    MULTIPLY_ADDS_A_CYCLE,
    PROCESSORS,
    RAMP_SECONDS,
    Card,
)
from diffquant.family.call import AttentionCall
from diffquant.kernels.attention.prefill import prefill
from diffquant.kernels.attention.prefill_int8 import prefill_int8
from diffquant.kernels.attention.prefill_simulated import TILES as SIMULATED_TILES
from diffquant.kernels.attention.prefill_simulated import prefill_simulated
from diffquant.kernels.attention.prefill_specialized import TILES as SPECIALIZED_TILES
from diffquant.kernels.attention.prefill_specialized import prefill_specialized
from diffquant.kernels.cache.decode import decode
from diffquant.kernels.cache.decode_cut import TILES as DECODE_TILES
from diffquant.kernels.cache.decode_cut import DecodeTile
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.cache.paged import PAGE, decode_paged
from diffquant.kernels.cache.paged import TILES as PAGED_TILES
from diffquant.kernels.linear.gemm import TILES as GEMM_TILES
from diffquant.kernels.linear.linear import launch as launch_linear
from diffquant.scheme import Scheme

MODEL = model_named("3B")
_LONG, _SHORT, _CONTEXT, _BATCH = 16384, 8192, 16384, 8
_COMPILED_ON = Workload(MODEL, 256, 256, 1, "float16")
_ROW, _SHIFT = "simulated 8:row, 8K", "simulated 8:row:shift, 8K"
_OPERANDS, _OPERANDS_SHIFT = f"{_ROW}, qk 8:row", f"{_SHIFT}, qk 8:row"
_FP16, _FP16_SHORT, _FP8 = "fused fp16, 16K", "fused fp16, 8K", "int8 QK and fp8 PV, 16K"
# The same with warps specialized.
_ROW_SPECIALIZED, _SHIFT_SPECIALIZED = f"{_ROW}, specialized", f"{_SHIFT}, specialized"
_FP16_SPECIALIZED, _FP16_SHORT_SPECIALIZED = f"{_FP16}, specialized", f"{_FP16_SHORT}, specialized"
_FP8_SPECIALIZED = f"{_FP8}, specialized"
_FP16_PIPELINED, _FP16_SHORT_PIPELINED = f"{_FP16}, pipelined", f"{_FP16_SHORT}, pipelined"
_CUDNN, _FLASH = "Transformer, cuDNN, 16K", "Transformer, FlashAttention-2, 16K"
_FOUR, _TWO = "four cuDNN calls, 16K", "two cuDNN calls of 256 values, 16K"
_DENSE, _PACKED = "dense fp16 linear", "4-bit linear"
_GEMM, _DENSE_OF = "4-bit linear, {} tokens".format, "dense fp16 linear, {} tokens".format
# By tokens, how many times as fast as dense fp16 Marlin is by its own benchmark, on a card that is not named: a run
# that was posted to https://github.com/vllm-project/vllm/pull/2497 in January 2024. The aim is nine tenths of that.
_MARLIN = {32: 2.28, 64: 1.47, 128: 1.01, 256: 0.74, 512: 0.73, 1024: 0.66}
# Dense products of 1,024 tokens in that run: 141 / 0.66 TFLOP/s, of 312 if the card is an A100, as its numbers look.
_DENSE_SHARE = 0.69
_CACHE = "decode, {}-bit cache".format
_PAGES = "decode, 16-bit cache in pages"

# Of P1 to P5 and others, by name.
AIMS = (
    ("P1", Aim(_FP8, _CUDNN, 1.25)),
    ("P1", Aim(_FP8_SPECIALIZED, _CUDNN, 1.25)),
    ("P1", Aim(_FP8_SPECIALIZED, _FLASH, 1.5)),
    ("P2", Aim(_FP16, _FOUR, 1.3)),
    ("P2", Aim(_FP16_SPECIALIZED, _FOUR, 1.3)),
    ("P2", Aim(_FP16_SPECIALIZED, _TWO, 1.0)),
    ("P2", Aim(_FP16_PIPELINED, _FOUR, 1.3)),
    ("P2", Aim(_FP16_PIPELINED, _TWO, 1.15)),
    ("P3", Aim(_ROW, _FP16_SHORT, 1 / 1.6)),
    ("P3", Aim(_SHIFT, _FP16_SHORT, 1 / 1.6)),
    ("P3", Aim(_OPERANDS, _FP16_SHORT, 1 / 1.6)),
    ("P3", Aim(_OPERANDS_SHIFT, _FP16_SHORT, 1 / 1.6)),
    ("P3", Aim(_ROW_SPECIALIZED, _FP16_SHORT_SPECIALIZED, 1 / 1.6)),
    ("P3", Aim(_SHIFT_SPECIALIZED, _FP16_SHORT_SPECIALIZED, 1 / 1.6)),
    ("P3", Aim(_ROW_SPECIALIZED, _FP16_SHORT_PIPELINED, 1 / 1.6)),
    ("P3", Aim(_SHIFT_SPECIALIZED, _FP16_SHORT_PIPELINED, 1 / 1.6)),
    ("P4", Aim(_CACHE(4), _CACHE(16), 3.0)),
    ("P5", Aim(_PACKED, _DENSE, 3.0)),
    *(("GEMM", Aim(_GEMM(tokens), _DENSE_OF(tokens), 0.9 * marlin)) for tokens, marlin in _MARLIN.items()),
    *estimated_latents.AIMS,
)


def paths() -> list[Path]:
    """Paths of all aims; each compiles its kernels when it is estimated."""
    call = differential(_COMPILED_ON, "cpu")
    pipelined = partial(prefill_specialized, call, pipelined=True)
    return [
        Path(_FP8, partial(prefill_int8, call, "fp8"), partial(_attention, _LONG, 128, 128)),
        Path(_FP16, partial(prefill, call), partial(_attention, _LONG, 128, 128)),
        Path(_FP16_SHORT, partial(prefill, call), partial(_attention, _SHORT, 128, 128)),
        Path(_FP8_SPECIALIZED, partial(prefill_specialized, call, 8), partial(_attention, _LONG, 128, 128)),
        Path(_FP16_SPECIALIZED, partial(prefill_specialized, call), partial(_attention, _LONG, 128, 128)),
        Path(_FP16_SHORT_SPECIALIZED, partial(prefill_specialized, call), partial(_attention, _SHORT, 128, 128)),
        Path(_FP16_PIPELINED, pipelined, partial(_attention, _LONG, 128, 64)),
        Path(_FP16_SHORT_PIPELINED, pipelined, partial(_attention, _SHORT, 128, 64)),
        _simulated(_ROW, call, "8:row", specialized=False),
        _simulated(_SHIFT, call, "8:row:shift", specialized=False),
        _simulated(_OPERANDS, replace(call, qk=Scheme.parse("8:row")), "8:row", specialized=False),
        _simulated(_OPERANDS_SHIFT, replace(call, qk=Scheme.parse("8:row")), "8:row:shift", specialized=False),
        _simulated(_ROW_SPECIALIZED, call, "8:row", specialized=True),
        _simulated(_SHIFT_SPECIALIZED, call, "8:row:shift", specialized=True),
        _decode(16),
        _decode(4),
        _decode_paged(),
        _linear(1),
        *map(_linear, _MARLIN),
        *estimated_latents.paths(),
    ]


def print_estimates() -> int:
    """Compile, estimate and print everything; 4 where an aim is missed."""
    planned = paths()
    texts = [ASSUMPTIONS]
    for card in CARDS:
        # Keys are split by what the card's memory moves.
        estimates = {path.name: estimate(compiled(path, card.absent), card) for path in planned}
        texts.append(report(card, estimates, rivals(card), AIMS))
    print("\n\n".join(texts))
    return 4 if any(" missed " in text for text in texts) else 0


def rivals(card: Card) -> dict[str, float]:
    """Seconds of what is not ours on a card, by name."""
    dense = MODEL.hidden * MODEL.inner * 2
    multiplied = _DENSE_SHARE * 2 * PROCESSORS * CLOCK_HZ * MULTIPLY_ADDS_A_CYCLE["16"]
    return {
        _CUDNN: attention_seconds(_LONG, 4, CUDNN),
        _FLASH: attention_seconds(_LONG, 4, FLASH_2),
        _FOUR: attention_seconds(_LONG, 8, CUDNN),
        _TWO: attention_seconds(_LONG, 6, CUDNN),
        _DENSE: dense / card.bytes_a_second + RAMP_SECONDS,
        **{
            _DENSE_OF(tokens): RAMP_SECONDS + max(dense / card.bytes_a_second, tokens * dense / multiplied)
            for tokens in _MARLIN
        },
        **estimated_latents.rivals(card),
    }


def _attention(tokens: int, queries: int, keys: int, launch: Launch) -> Work:
    """Work of a launch of prefill: both maps' steps, or what quantizing reads and writes."""
    elements = tokens * MODEL.pairs * (2 * MODEL.width + 2 * MODEL.width + MODEL.value_width)
    if launch.binary.main_loops:
        return Work(2 * MODEL.pairs * tile_steps(tokens, queries, keys), 2 * elements)
    # Statistics read K and V; quantizing reads 16 bits of everything and writes 8.
    read_again = 2 * elements * (2 * MODEL.width + MODEL.value_width) / (4 * MODEL.width + MODEL.value_width)
    return Work(nbytes=read_again if launch.binary.kernel == "_statistics" else 3 * elements)


def _simulated(name: str, call: AttentionCall, scheme: str, specialized: bool) -> Path:
    keys_of_a_step = {
        "extremes": SIMULATED_TILES[f"simulated/sm_90/{MODEL.width}"].keys,
        "attend_rounded": SIMULATED_TILES[f"simulated/sm_90/{MODEL.width}"].keys,
        "attend_specialized": SPECIALIZED_TILES[f"simulated_specialized/sm_90/{MODEL.width}x{MODEL.value_width}"].keys,
    }

    def work(launch: Launch) -> Work:
        if launch.binary.kernel == "round_rows":
            # Of one map's queries or keys: read, and codes written, in 16 bits each, with a scale of 32 a row.
            return Work(nbytes=_SHORT * MODEL.pairs * (4 * MODEL.width + 4))
        return _attention(_SHORT, 128, keys_of_a_step[launch.binary.kernel], launch)

    rounded = replace(call, logits=Scheme.parse(scheme))
    return Path(name, partial(prefill_simulated, rounded, specialized), work)


def _decode(bits: int) -> Path:
    heads = _BATCH * MODEL.kv_pairs
    tile = DECODE_TILES[f"decode/sm_90/{MODEL.value_width}/{bits}"]
    return Path(_CACHE(bits), _decode_call(bits, heads), partial(_decoding, tile, heads, bits))


def _decode_paged() -> Path:
    """Decoding of as many sequences whose tables name one page: nothing is read when it is compiled."""
    heads = _BATCH * MODEL.kv_pairs
    call = differential(Workload(MODEL, 1, 1, _BATCH, "float16"), "cpu")
    cache = torch.zeros(1, PAGE, MODEL.kv_pairs, 2 * MODEL.width + MODEL.value_width, dtype=torch.float16)
    k1, k2, v = cache.split([MODEL.width, MODEL.width, MODEL.value_width], -1)
    table = torch.zeros(_BATCH, _CONTEXT // PAGE, dtype=torch.int32)
    lengths = torch.full((_BATCH,), _CONTEXT, dtype=torch.int32)
    decode = partial(decode_paged, call.q, [k1, k2], v, table, lengths, call.lam, scale=call.scale)
    tile = PAGED_TILES[f"paged/sm_90/{MODEL.value_width}"]
    return Path(_PAGES, decode, partial(_decoding, tile, heads, 16))


def _decoding(tile: DecodeTile, heads: int, bits: int, launch: Launch) -> Work:
    """Work of a launch of decode over all heads' caches."""
    if not launch.binary.main_loops:
        return Work()
    steps = heads * _CONTEXT / (tile.tokens * tile.warps)
    width = 2 * MODEL.width + MODEL.value_width
    return Work(steps, heads * _CONTEXT * width * bits / 8, launch.programs)


def _decode_call(bits: int, heads: int) -> Callable[[], Tensor]:
    """Decoding over one head's store, which stands for all of them: nothing is read when it is compiled."""

    def many(x: Tensor) -> Tensor:
        return x.expand(heads, *x.shape[1:])

    def launch() -> Tensor:
        call = differential(Workload(MODEL, 1, 1, 1, "float16"), "cpu")
        keys = torch.cat([k[:, :1] for k in call.k], 1)
        store = KVStore(RECIPES[bits], keys, call.v[:, :1], _CONTEXT)
        store.replace_tensors(many)
        return decode([many(x[:, :1]) for x in call.q], store, call.lam, scale=call.scale)

    return launch


def _linear(tokens: int) -> Path:
    def multiply() -> Tensor:
        packed, _ = kernels.packed_weight(torch.zeros(64, MODEL.hidden, dtype=torch.float16), 4, 128)
        # Of as many rows as the layer has: nothing is read when it is compiled.
        low = packed.low[:1].expand(MODEL.inner // 16, *packed.low.shape[1:])
        packed = replace(packed, low=low, shape=(MODEL.inner, MODEL.hidden))
        return launch_linear(torch.zeros(tokens, MODEL.hidden, dtype=torch.float16), packed, None)

    def work(launch: Launch) -> Work:
        codes = MODEL.hidden * MODEL.inner * (4 + 16 / 128) / 8
        if tokens > 1:
            # A step is a tile by 64 columns. Parts of a K that is split are of 32 bits, written and read again.
            tile = GEMM_TILES[f"gemm/sm_90/{min(tokens, 128)}"]
            tiles = ceil(tokens / tile.tokens) * MODEL.inner // tile.rows
            splits = PROCESSORS // tiles or 1
            parts, out = 4 * splits * tokens * MODEL.inner * (splits > 1), 2 * tokens * MODEL.inner
            if launch.binary.kernel == "_add":
                return Work(nbytes=parts + out)
            moved = codes + 2 * tokens * MODEL.hidden + (parts or out)
            return Work(tiles * MODEL.hidden / 64, moved, launch.programs)
        # A step of the loop is a block of 16 rows by all columns; the last to end has as many as any.
        steps = ceil(MODEL.inner / 16 / launch.programs) * launch.programs
        # Codes, and a scale of 16 bits for each 128 of them.
        return Work(steps, codes, launch.programs)

    return Path(_PACKED if tokens == 1 else _GEMM(tokens), multiply, work)

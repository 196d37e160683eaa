"""A call of every kernel by family, width and bits, as rows of a table: what is compiled for every card."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.support.kernel_inputs import on_call, random_call

Call = Callable[..., object]
FAMILIES = ("v1", "v2")


def every_kernel() -> Iterator[tuple[str, Call]]:
    """Names of kernels and calls that launch them; a call whose card cannot run it raises UsageError."""
    yield from _prefill()
    yield from _decode()
    yield from _decode_latent()
    yield from _linear()


def _prefill() -> Iterator[tuple[str, Call]]:
    from diffquant.kernels.attention.prefill import prefill
    from diffquant.kernels.attention.prefill_int8 import prefill_int8
    from diffquant.kernels.attention.prefill_simulated import prefill_simulated
    from diffquant.kernels.attention.prefill_specialized import prefill_specialized

    simulated = partial(on_call(prefill_simulated), scheme=Scheme.parse("8:row:shift"))
    kinds: dict[str, Call] = {
        "prefill": on_call(prefill),
        "int8 QK, fp16 PV": partial(on_call(prefill_int8), pv="fp16"),
        "int8 QK, fp8 PV": partial(on_call(prefill_int8), pv="fp8"),
        "simulated logits": simulated,
        "simulated logits of rounded operands": partial(simulated, qk=Scheme.parse("8:row")),
        "warp-specialized": partial(on_call(prefill_specialized), bits=16),
        "warp-specialized, fp8": partial(on_call(prefill_specialized), bits=8),
        "warp-specialized, simulated logits": partial(simulated, specialized=True),
    }
    for kind, call in kinds.items():
        for family in FAMILIES:
            for width in (64, 128):
                arguments = random_call(family, 256, 256, width=width, dtype=torch.bfloat16)
                yield f"{kind}, {family} {width}", partial(call, *arguments, scale=0.125)


def _decode() -> Iterator[tuple[str, Call]]:
    from diffquant.kernels.cache.append import append
    from diffquant.kernels.cache.decode import decode
    from diffquant.kernels.cache.kv_store import KVStore
    from diffquant.kernels.cache.paged import decode_paged

    for family in FAMILIES:
        q, k, v, lam = random_call(family, 1, 1, width=128, dtype=torch.bfloat16, pairs=8, kv_pairs=2)
        keys = torch.cat(k, 1) if family == "v1" else k[0]
        for bits in (16, 8, 6, 4):
            store = KVStore(Recipe.of(kv=bits), keys, v, 4096)
            yield f"decode {bits} bits, {family} 128", partial(decode, q, store, lam, scale=0.125)
        store = KVStore(Recipe.of(k="4:c64", v=4, residual=64), keys, v, 4096)
        yield f"append 4 bits, {family} 128", partial(append, store, keys, v)
        cache = [x.new_zeros(256, 16, 2, x.shape[3]) for x in (*k, v)]
        pages = [cache[0], cache[0 if family == "v2" else 1]], cache[2], torch.zeros(1, 256, dtype=torch.int32)
        lengths = torch.ones(1, dtype=torch.int32)
        yield f"paged 16 bits, {family} 128", partial(decode_paged, q, *pages, lengths, lam, scale=0.125)


def _decode_latent() -> Iterator[tuple[str, Call]]:
    from diffquant.kernels.cache.kv_store import KVStore
    from diffquant.kernels.cache.latent import decode_latent
    from tests.support.latent_inputs import SCALE, random_latents

    q, turned, latents, lam = random_latents(1, 1, pairs=64, noises=16, dtype=torch.bfloat16)
    for bits in (16, 8, 6, 4):
        store = KVStore(Recipe.of(kv=bits), turned, latents, 4096)
        yield f"latents {bits} bits", partial(decode_latent, q, store, lam, scale=SCALE)
    store = KVStore(Recipe.of(k="4:c64", v=4, residual=64), turned, latents, 4096)
    yield "latents 4 bits, 4:c64 keys", partial(decode_latent, q, store, lam, scale=SCALE)


def _linear() -> Iterator[tuple[str, Call]]:
    from diffquant.kernels.linear.gemm import launch_dequantize, launch_gemm
    from diffquant.kernels.linear.linear import launch_matmul
    from diffquant.kernels.linear.repack import PackedWeight, repack, repack_floats
    from diffquant.recipe.numbers.packing import packed_words

    def zeros(bits: int, rows: int) -> PackedWeight:
        words = torch.zeros(rows, packed_words(3072, bits), dtype=torch.int32)
        return repack(words, torch.ones(rows, 3072 // 128, dtype=torch.float16), bits, 3072)

    def floats(name: str, rows: int) -> PackedWeight:
        scale = torch.ones(rows, 3072 // (16 if name == "nvfp4" else 32), dtype=torch.uint8)
        divisor = torch.ones(1) if name == "nvfp4" else None
        return repack_floats(torch.zeros(rows, 3072 // 2, dtype=torch.uint8), scale, divisor, 3072)

    x = torch.zeros(64, 3072, dtype=torch.float16)
    for name in ("nvfp4", "mxfp4"):
        yield f"GEMV {name}", partial(launch_matmul, x[:1], floats(name, 64), None)
        yield f"GEMM {name}", partial(launch_gemm, x, floats(name, 1024), None)
    few = zeros(4, 64)
    # Of as many rows as make a program compute several blocks of them: nothing is read when it is compiled.
    many = replace(few, low=few.low[:1].expand(1024, *few.low.shape[1:]), shape=(16 * 1024, 3072))
    yield "GEMV 4 bits of many rows", partial(launch_matmul, x[:1], many, None)
    for bits in (8, 6, 4):
        yield f"GEMV {bits} bits", partial(launch_matmul, x[:1], zeros(bits, 64), None)
    for bits in (8, 6, 4):
        yield f"GEMM {bits} bits", partial(launch_gemm, x, zeros(bits, 1024), None)
    yield "GEMM 4 bits, 128 tokens", partial(launch_gemm, x.repeat(2, 1), zeros(4, 1024), None)
    yield "expand 4 bits", partial(launch_dequantize, zeros(4, 64), torch.float16)

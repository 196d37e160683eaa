"""The groups of measurements that a GPU is asked for: who runs in each, on what, and which ratios are to be reached."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from diffquant.benchmarks.workloads import V2, Model, find_model
from diffquant.family.call import AttentionCall
from research.bench.gpu.stores import CONTIGUOUS, latent_cells, paged_cells

_TURNS = 3
_GENERATIONS = 3
FP16, INT8, FP8 = "DIFF, fused", "DIFF, fused, int8 QK", "DIFF, fused, int8 QK, fp8 PV"
FLASH, CUDNN, PACKAGE = "Transformer, SDPA flash", "Transformer, SDPA cuDNN", "Transformer, flash-attn"
SPECIALIZED, FP8_SPECIALIZED = f"{FP16}, specialized", f"{FP8}, specialized"
# Who else computes fp16 attention of the matched Transformer: FlashAttention-2 as torch ships it, cuDNN, the package.
REFERENCES = (FLASH, CUDNN, PACKAGE)
NEWEST = ("FlashDiffAttn_1, flash-attn-4", "Transformer, flash-attn-4")
FOUR, TWO = "FlashDiffAttn_2, SDPA cuDNN", "FlashDiffAttn_1, SDPA mem-efficient"
TWO_CUDNN = "FlashDiffAttn_1, SDPA cuDNN"
ROUNDED, ROUNDED_EAGERLY = "DIFF, simulated logits 8:row", "DIFF, simulated logits 8:row, eager"
SHIFTED = "DIFF, simulated logits 8:row:shift"
FLASH_TWO = "FlashDiffAttn_1, SDPA flash, keys padded"
QUANTIZING = "of it, quantizing Q, K and V"
GENERATING = "generate, {}-bit cache, {}, a token"
GRAPHED, ONE_BY_ONE = "CUDA graphs", "kernels one by one"


@dataclass(frozen=True)
class Aim:
    """Ratio to reach: how many times as fast as `other` the `path` is to be.

    Attributes:
        at_least: ratio below which the aim is missed.
        needs_other: whether `other` has to run. Where it does not, and need not, there is nothing to reach.
    """

    path: str
    other: str
    at_least: float
    needs_other: bool = True


@dataclass(frozen=True)
class Group:
    """Group of paths that share a workload.

    Attributes:
        measure: function of `arguments` that gives cells, in a process of its own.
        arguments: arguments of `measure`.
        references: paths that every other one is compared with in the table.
    """

    name: str
    aims: tuple[Aim, ...]
    measure: Callable[..., list[dict[str, Any]]]
    arguments: tuple[Any, ...]
    references: tuple[str, ...] = ()


def attention_cells(
    section: str, model: Model, queries: int, keys: int, batch: int, dtype: str, graph: bool, peers: Sequence[str]
) -> list[dict[str, Any]]:
    """Cells of the attention of one layer."""
    from diffquant.benchmarks.contest import PeerComparison
    from diffquant.benchmarks.workloads import Workload
    from research.bench.roofline import count_call

    work = Workload(model, queries, keys, batch, dtype)
    cells = PeerComparison(section, "cuda", _TURNS, tuple(peers), graph).run([work])
    return [cell.to_dict() | count_call(cell.path, work) for cell in cells]


def eight_bit_cells(model: Model, length: int, dtype: str, peers: Sequence[str]) -> list[dict[str, Any]]:
    """Cells of an attention in 8 bits, and how long it takes of that to make the codes."""
    from diffquant.benchmarks.measuring import make_timer, run_in_turns
    from diffquant.benchmarks.workloads import Workload, make_differential_call

    cells = attention_cells("attention", model, length, length, 1, dtype, True, peers)
    call = make_differential_call(Workload(model, length, length, 1, dtype), "cuda")
    values = run_in_turns({"": make_timer(lambda: eight_bit_codes(call), "cuda", graph=True)}, _TURNS)[""]
    return [*cells, {"path": QUANTIZING, "median": median(values), "values": values}]


def linear_cells(graph: bool, tokens: int) -> list[dict[str, Any]]:
    """Cells of every path of a linear layer of the 3B model, at some tokens."""
    from diffquant.benchmarks import linears
    from research.bench import peers  # noqa: F401  registers bitsandbytes and torchao

    cells = linears.run_linears([find_model("3B")], (tokens,), "float16", "cuda", _TURNS, graph=graph)
    return [cell.to_dict() for cell in cells]


def state_cells(context: int) -> list[dict[str, Any]]:
    """Cells of the 3B model's cache at a context, in megabytes of all layers as torch's allocator counts them."""
    import torch

    from diffquant.benchmarks.decode import RECIPES, fill_store
    from diffquant.benchmarks.workloads import Workload, make_differential_call

    model = find_model("3B")
    call = make_differential_call(Workload(model, 1, context, 1, "float16"), "cuda")
    cells = []
    for bits in (16, 8, 6, 4):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        stores = [fill_store(call, RECIPES[bits]) for _ in range(model.layers)]
        allocated = torch.cuda.memory_allocated() - before
        stored = sum(store.nbytes for store in stores)
        cells.append(
            {
                "path": f"{bits}-bit state",
                "median": allocated / 1e6,
                "values": [allocated / 1e6],
                "stored_bytes": stored,
            }
        )
        del stores
    return cells


def generation_cells(sizes: dict[str, int], prompt: int, tokens: int, device: str, dtype: str) -> list[dict[str, Any]]:
    """Cells of greedy generation, end to end, in milliseconds a token, by random V1 models of such sizes."""
    import time

    import torch

    from diffquant.model.adapters import adapter_for
    from diffquant.recipe import Recipe

    torch.manual_seed(0)
    model = adapter_for(sizes | {"model_type": "diffllama"}).architecture.new_model()
    model = model.to(device, getattr(torch, dtype)).eval()
    ids = torch.randint(model.config.vocab_size, (1, prompt), device=device)
    cells = []
    for bits in (16, 8, 4):
        model.apply_recipe(Recipe.of(kv=bits) if bits < 16 else Recipe.of())
        # What `generate` does by itself, and what it did before it replayed graphs.
        for how, options in ((GRAPHED, {}), (ONE_BY_ONE, {"graphed_steps": None})):
            values = []
            for turn in range(1 + _GENERATIONS):
                # Reading the prompt is no part of a token's time: it is timed by itself and taken off.
                milliseconds = []
                for count in (1, 1 + tokens):
                    _wait(device)
                    started = time.perf_counter()
                    model.generate(
                        ids,
                        do_sample=False,
                        min_new_tokens=count,
                        max_new_tokens=count,
                        pad_token_id=0,
                        **options,
                    )
                    _wait(device)
                    milliseconds.append(1e3 * (time.perf_counter() - started))
                if turn:  # the first one warms up
                    values.append((milliseconds[1] - milliseconds[0]) / tokens)
            cells.append(
                {
                    "path": GENERATING.format(bits, how),
                    "median": median(values),
                    "values": values,
                    "tokens_a_second": 1e3 / median(values),
                }
            )
    return cells


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def groups() -> list[Group]:
    """All groups, those of greatest interest first."""
    return [*_prefill_groups(), *_decode_groups(), *_linear_groups(), _state_group(), _generation_group()]


def _prefill_groups() -> list[Group]:
    model = find_model("3B")
    planned = [
        Group(
            "prefill V1, 16K tokens, float16, CUDA graphs: 8 bits",
            (Aim(FP8_SPECIALIZED, CUDNN, 1.0), Aim(FP8_SPECIALIZED, FLASH, 1.5)),
            eight_bit_cells,
            (model, 16384, "float16", (FP8_SPECIALIZED, FP8, INT8, SPECIALIZED, FP16, *REFERENCES)),
            REFERENCES,
        )
    ]
    # Not every cuDNN takes values wider than keys.
    fused = (Aim(SPECIALIZED, FOUR, 1.3), Aim(SPECIALIZED, TWO_CUDNN, 1.15, needs_other=False))
    rivals = (SPECIALIZED, FP16, FOUR, TWO_CUDNN, TWO, *NEWEST, *REFERENCES)
    planned += [
        _attention_group(f"prefill V1, {length} tokens, {dtype}", fused, model, length, dtype, rivals)
        for length, dtype in ((16384, "bfloat16"), (8192, "float16"), (4096, "bfloat16"))
    ]
    planned.append(
        _attention_group(
            "simulated logits 8:row and 8:row:shift, V1, 8K tokens, bfloat16",
            (Aim(ROUNDED, FP16, 1 / 1.6), Aim(SHIFTED, FP16, 1 / 1.6)),
            model,
            8192,
            "bfloat16",
            (ROUNDED, SHIFTED, ROUNDED_EAGERLY, FP16, *REFERENCES),
        )
    )
    planned.append(
        _attention_group(
            "prefill V2, 8K tokens, bfloat16",
            (),
            V2,
            8192,
            "bfloat16",
            # One call of each by name, since SDPA does not say which of its backends it chose.
            (SPECIALIZED, FP16, TWO_CUDNN, *NEWEST, *REFERENCES),
        )
    )
    planned.append(
        _attention_group(
            "prefill V1, d 64, 8K tokens, bfloat16", (), find_model("diffllama-1b"), 8192, "bfloat16", rivals
        )
    )
    return planned


def _attention_group(
    name: str, aims: tuple[Aim, ...], model: Model, length: int, dtype: str, peers: Sequence[str]
) -> Group:
    arguments = ("attention", model, length, length, 1, dtype, True, peers)
    named = f"{name}, CUDA graphs"
    return Group(
        named, aims, attention_cells, arguments, tuple(x for x in peers if x in (*REFERENCES, *NEWEST, TWO_CUDNN))
    )


def _decode_groups() -> list[Group]:
    cache = "DIFF, fused, {}-bit cache".format
    aims = (Aim(cache(4), cache(16), 3.3),)
    peers = (*map(cache, (16, 8, 6, 4)), FLASH_TWO, "FlashDiffAttn_2, SDPA flash", *REFERENCES)
    planned = []
    # The host's launches take longer than the kernels: aims are for graphs, which `generate` replays.
    for graph, how in ((True, ", CUDA graphs"), (False, "")):
        arguments = ("decode", find_model("3B"), 1, 16384, 8, "float16", graph, peers)
        name = f"decode V1, context 16K, batch 8, float16{how}"
        planned.append(Group(name, aims if graph else (), attention_cells, arguments, REFERENCES))
    graphed = "context 16K, batch 8, float16, CUDA graphs"
    planned.append(Group(f"decode V1 from pages, {graphed}", (), paged_cells, (16384, 8), (CONTIGUOUS,)))
    planned.append(Group(f"decode Motif-3 from latents, {graphed}", (), latent_cells, (16384, 8)))
    return planned


def _linear_groups() -> list[Group]:
    one, many = ((Aim("packed, 4 bits", "dense", ratio),) for ratio in (2.5, 1.6))
    return [
        Group("linear 3072 -> 8192, 1 token, float16, CUDA graphs", one, linear_cells, (True, 1), ("dense",)),
        Group("linear 3072 -> 8192, 1 token, float16", (), linear_cells, (False, 1), ("dense",)),
        *(
            Group(
                f"linear 3072 -> 8192, {tokens} tokens, float16, CUDA graphs",
                many if tokens == 64 else (),
                linear_cells,
                (True, tokens),
                ("dense",),
            )
            for tokens in (16, 64, 256)
        ),
    ]


def _state_group() -> Group:
    aims = (Aim("4-bit state", "16-bit state", 1 / 0.30),)
    return Group("attention state of the 3B model at 32K tokens (MB)", aims, state_cells, (32768,))


def _generation_group() -> Group:
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 19,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
    }
    arguments = (sizes, 1024, 64, "cuda", "bfloat16")
    eager = tuple(GENERATING.format(bits, ONE_BY_ONE) for bits in (16, 8, 4))
    return Group("generation by a DiffLlama of 1 B parameters, batch 1", (), generation_cells, arguments, eager)


def eight_bit_codes(call: AttentionCall) -> Any:
    """8-bit Q, K and V of a call, as `triton-fp8` makes them before it attends."""
    from diffquant.kernels.arguments import match_strides
    from diffquant.kernels.attention.prefill_int8 import TILES
    from diffquant.kernels.attention.quantize_qkv import quantize_qkv
    from diffquant.kernels.configs import choose_config
    from diffquant.kernels.gpu import device_class

    tile = choose_config(TILES, f"prefill_int8/{device_class(call.v.device)}/{call.q[0].shape[-1]}")
    q, k, (v,) = match_strides(*call.q), match_strides(*call.k), match_strides(call.v)
    return quantize_qkv(q, k, v, None, None, call.scale, tile_rows=tile["queries"], block=tile["keys"], values=True)

"""A pytest plugin that runs tests of `tests/gpu` without a GPU: their kernels run on the PTX machine.

DIFFQUANT_PTX names the compute capability that they are compiled for, times ten. Tensors that the tests ask for on a
CUDA device are the host's. Of the tests those are kept that `SELECTED` names, so that each kernel runs for each family
and width at least once; random calls have one head of keys. What only a device has (its memory's peak, what
torch.compile makes) is not looked at.

DIFFQUANT_PTX_RESULTS may name a JSON file, for the processor seconds of each test that passed, compiling included, and
the launches and instructions of each kernel. Tests that it has already are left out: a run can be taken up again.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from diffquant.support.files import write_json

CAPABILITY = "DIFFQUANT_PTX"
RESULTS = "DIFFQUANT_PTX_RESULTS"
# Few multiprocessors split keys into few shares.
PROCESSORS = 4
SHARED_MEMORY = {80: 166_912, 90: 232_448}
_SHORT = ("causal", "ragged, one empty")
_HALF, _BFLOAT = torch.float16, torch.bfloat16

Parameters = Mapping[str, Any]
# By test: which of its cases. Widths and types go together, as most tests have them.
SELECTED: dict[str, Callable[[Parameters], bool]] = {
    "test_prefill.py::test_equals_the_plain_form": lambda p: (
        p["name"] in _SHORT and (p["width"], p["dtype"]) in ((128, _HALF), (64, _BFLOAT))
    ),
    "test_prefill_int8.py::test_close_to_the_plain_form": lambda p: (
        p["name"] == "ragged, one empty" or (p["name"], p["width"]) == ("causal", 64)
    ),
    "test_specialized.py::test_close_to_the_plain_form": lambda p: p["name"] in _SHORT,
    "test_specialized.py::test_rounded_logits_fall_on_the_codes_of_the_plain_form": lambda p: (
        p["name"] == "right padding" and (p["generation"], p["text"]) in (("v1", "4:row:shift"), ("v2", "8:row"))
    ),
    "test_simulated.py::test_equals_the_plain_form_at_every_border": lambda p: (
        ((p["name"], p["text"]) in (("ragged, one empty", "4:row"), ("causal", "8:head:shift")) and p["width"] == 64)
        # Rows that see nothing, whose weights float16 would not hold.
        or (
            p["name"] in ("more queries than keys", "ragged")
            and (p["generation"], p["text"], p["width"]) in (("v1", "8:head:shift", 128), ("v2", "4:row", 128))
        )
    ),
    "test_simulated.py::test_weights_in_blocks_are_rounded_as_the_plain_form_rounds_them": lambda p: (
        (p["generation"], p["width"], p["logits"]) in (("v1", 64, "16"), ("v2", 128, "8:row"))
    ),
    "test_simulated.py::test_queries_and_keys_are_rounded_as_before_the_plain_form": lambda p: (
        (p["generation"], p["width"], p["qk"]) in (("v1", 64, "8:row"), ("v2", 128, "4:row"), ("plain", 64, "mxfp8"))
    ),
    "test_decode.py::test_what_is_stored_are_the_codes_of_numbers": lambda p: len(p["chunks"]) == 5,
    "test_decode.py::test_what_a_query_sees": lambda p: p["keys"] in (1, 3) or p["mask"].window,
    "test_decode.py::test_pairs_that_share_a_noise_head_read_it_once": lambda _: True,
    "test_decode.py::test_the_pair_norm_is_part_of_the_kernel": lambda _: True,
    "test_decode.py::test_replays_beyond_the_capacity_touch_nothing_else": lambda _: True,
    "test_paged.py::test_shuffled_pages_of_sequences_of_any_length": lambda p: (
        (p["lengths"], p["width"]) in (((300, 1, 0, 65), 64), ((16, 129), 128))
    ),
    "test_paged.py::test_chunks_see_a_window_and_both_maps_keys_in_one_head": lambda p: p["window"] == 70,
    "test_paged.py::test_a_captured_step_is_valid_while_sequences_grow_and_pages_change": lambda _: True,
    "test_latent.py::test_equals_the_plain_form": lambda p: (
        p["keys"] == 70
        and (p["pairs"] == 4 or (p["pairs"] == 64 and p["recipe"].k.bits == 8))
        and p["dtype"] == (_BFLOAT if p["recipe"].v.bits in (4, 16) else _HALF)
    ),
    "test_latent.py::test_chunks_of_ragged_sequences_see_a_window": lambda p: p["window"] is not None,
    "test_latent.py::test_a_captured_step_is_valid_while_the_store_fills": lambda _: True,
    "test_linear.py::test_kernels_equal_float64": lambda p: (
        (p["rows"], p["tokens"]) in ((33, 1), (33, 16), (200, 3), (50, 17)) and (p["bits"] != 6 or p["dtype"] == _HALF)
    ),
    "test_linear.py::test_floats_under_scales_of_a_byte_equal_float64": lambda p: (
        (p["rows"], p["tokens"]) in ((33, 1), (33, 16), (33, 17))
    ),
    "test_linear.py::test_programs_of_several_row_blocks_ask_for_words_ahead": lambda p: p["width"] != 1024,
    "test_linear.py::test_floats_are_written_out_as_they_are_decoded": lambda _: True,
    "test_linear.py::test_a_layer_waits_for_the_one_whose_output_it_takes": lambda _: True,
    "test_linear.py::test_codes_in_the_next_wider_container": lambda p: p["bits"] in (3, 5),
    "test_linear.py::test_expanded_weights_are_the_checkpoints": lambda p: p["group"] in (64, "tensor"),
}
# Tests whose sequences are all alike: one will do.
_ONE_SEQUENCE = ("test_what_is_stored_are_the_codes_of_numbers", "test_pairs_that_share_a_noise_head_read_it_once")
_stack = ExitStack()
_launched: list[Any] = []
_results: dict[str, dict[str, Any]] = {"tests": {}, "kernels": {}}
_sequences: dict[str, int] = {}


class _OnHost(TorchFunctionMode):
    """Puts on the host what is asked for on a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if name == "to":
            args = tuple("cpu" if _is_cuda(x) else x for x in args)
        return func(*args, **kwargs)


class _Generator(torch.Generator):
    """A random generator of the host's, whatever device it is asked for on."""

    def __new__(cls, *_: object) -> "_Generator":
        return super().__new__(cls)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def pytest_configure() -> None:
    from diffquant.kernels import gpu
    from diffquant.kernels.attention import online
    from tests.support.ptx.graphs import Graph, capture
    from tests.support.ptx.launching import launches_run_here

    capability = int(os.environ[CAPABILITY])
    assumed = gpu.Gpu((capability // 10, capability % 10), SHARED_MEMORY[capability], PROCESSORS)
    vars(gpu).update(gpu_of=lambda _: assumed, device_refusal=lambda _: None)
    vars(online).update(_allocate=lambda size, *_: torch.empty(size, dtype=torch.int8))
    vars(torch.cuda).update(
        is_available=lambda: True,
        get_device_capability=lambda *_: assumed.capability,
        synchronize=lambda *_: None,
        device_of=lambda *_: nullcontext(),
        CUDAGraph=Graph,
        graph=capture,
    )
    vars(torch).update(Generator=_Generator)
    global _launched  # noqa: PLW0603
    _launched = _stack.enter_context(launches_run_here(capability))

    # Behind the stand-ins above, which it imports.
    from tests.support import kernel_inputs

    vars(kernel_inputs).update(random_call=_with_few_heads(kernel_inputs.random_call))
    _stack.enter_context(torch.no_grad())
    _stack.enter_context(_OnHost())


def _with_few_heads(random_call: Callable[..., Any]) -> Callable[..., Any]:
    """`random_call` with one head of keys, as many pairs for it as were asked, and one sequence where that will do."""

    def few(generation: str, queries: int, keys: int, **shape: Any) -> Any:
        pairs = shape.get("pairs", 2) // shape.get("kv_pairs", 1)
        return random_call(generation, queries, keys, **shape | {"pairs": pairs, "kv_pairs": 1} | _sequences)

    return few


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test, with one sequence where all are alike, and note what it took."""
    _sequences.clear()
    _launched.clear()
    if item.name.split("[")[0] in _ONE_SEQUENCE or _parameters(item).get("name") == "causal":
        _sequences["batch"] = 1
    began = time.process_time()
    yield
    _results["tests"][_named(item)] = round(time.process_time() - began, 2)
    for launch in _launched:
        kernel = _results["kernels"].setdefault(launch.name, {"launches": 0, "instructions": 0})
        kernel["launches"] += 1
        kernel["instructions"] += launch.executed
    if file := os.environ.get(RESULTS):
        write_json(Path(file), _results)


def pytest_unconfigure() -> None:
    _stack.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what `SELECTED` names and did not pass before."""
    if (file := Path(os.environ.get(RESULTS, ""))).is_file():
        _results.update(json.loads(file.read_text()))
    kept = [item for item in items if _is_selected(item) and _named(item) not in _results["tests"]]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _is_selected(item: pytest.Item) -> bool:
    chosen = SELECTED.get(f"{item.path.name}::{item.name.split('[')[0]}")
    return chosen is not None and chosen(_parameters(item))


def _named(item: pytest.Item) -> str:
    return f"{item.path.name}::{item.name}"


def _parameters(item: pytest.Item) -> Parameters:
    return {} if (callspec := getattr(item, "callspec", None)) is None else callspec.params


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, kernel in sorted(_results["kernels"].items()):
        terminalreporter.write_line(f"{name}: {kernel['launches']} launches, {kernel['instructions']} instructions")

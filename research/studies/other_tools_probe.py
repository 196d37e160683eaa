"""What a tool of others does to each of some models: it runs without diffquant, on stock transformers.

    python -m research.studies.other_tools_probe models.json written "bitsandbytes nf4"

`research.studies.other_tools` starts it. Each tool runs in a process of its own, and another opens what it wrote.
A JSON line for each model says which step was reached, and which error ended it. models.json maps a model's name to its
folder and whether the folder's own code may run.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

# (the name of the step that was reached, the model as it is then)
Steps = Iterator[tuple[str, Any]]
# (folder, whether its code may run, folder to write) -> steps
Tool = Callable[[str, bool, Path], Steps]
STEPS = ("opened", "quantized", "written", "reopened")
# Bits, and what a group shares, where a tool takes them.
_GROUP = 128
_WINDOWS, _LENGTH = 8, 64
_SECONDS = 300


def _bitsandbytes(folder: str, trust: bool, out: Path) -> Steps:
    config = _config("BitsAndBytesConfig")
    yield from _while_opening(folder, trust, out, config(load_in_4bit=True, bnb_4bit_quant_type="nf4"))


def _torchao(folder: str, trust: bool, out: Path) -> Steps:
    integers = import_module("torchao.quantization").Int8WeightOnlyConfig()
    yield from _while_opening(folder, trust, out, _config("TorchAoConfig")(integers))


def _hqq_by_transformers(folder: str, trust: bool, out: Path) -> Steps:
    yield from _while_opening(folder, trust, out, _config("HqqConfig")(nbits=4, group_size=64))


def _hqq(folder: str, trust: bool, out: Path) -> Steps:
    model = _open(folder, trust)
    yield "opened", model
    by_name = import_module("hqq.models.hf.base").AutoHQQHFModel
    settings = import_module("hqq.core.quantize").BaseQuantizeConfig(nbits=4, group_size=64)
    by_name.quantize_model(model, quant_config=settings, compute_dtype=torch.float32, device="cpu")
    yield "quantized", model
    by_name.save_quantized(model, str(out))
    yield "written", model


def _quanto(folder: str, trust: bool, out: Path) -> Steps:
    yield from _while_opening(folder, trust, out, _config("QuantoConfig")(weights="int4"))


def _llm_compressor(folder: str, trust: bool, out: Path) -> Steps:
    modifier = import_module("llmcompressor.modifiers.quantization").QuantizationModifier
    yield from _oneshot(folder, trust, out, modifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]), None)


def _llm_compressor_gptq(folder: str, trust: bool, out: Path) -> Steps:
    modifier = import_module("llmcompressor.modifiers.gptq").GPTQModifier
    rows = {"input_ids": _ids(folder).tolist(), "attention_mask": [[1] * _LENGTH] * _WINDOWS}
    dataset = import_module("datasets").Dataset.from_dict(rows)
    yield from _oneshot(folder, trust, out, modifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]), dataset)


def _auto_round(folder: str, trust: bool, out: Path) -> Steps:
    model = _open(folder, trust)
    yield "opened", model
    tuner = import_module("auto_round").AutoRound(
        model,
        AutoTokenizer.from_pretrained(folder, trust_remote_code=trust),
        scheme="W4A16",
        group_size=_GROUP,
        seqlen=_LENGTH,
        nsamples=_WINDOWS,
        iters=20,
        dataset=[{"input_ids": ids[None]} for ids in _ids(folder)],
        device_map="cpu",
        enable_torch_compile=False,
    )
    tuner.quantize()
    yield "quantized", model
    tuner.save_quantized(str(out), format="auto_round")
    yield "written", model


def _model_optimizer(folder: str, trust: bool, out: Path) -> Steps:
    model = _open(folder, trust)
    yield "opened", model
    quantization = import_module("modelopt.torch.quantization")
    ids = _ids(folder)
    model = quantization.quantize(model, quantization.INT4_BLOCKWISE_WEIGHT_ONLY_CFG, lambda it: it(ids))
    yield "quantized", model
    import_module("modelopt.torch.export").export_hf_checkpoint(model, export_dir=str(out))
    yield "written", model


def _torch_onnx(folder: str, trust: bool, out: Path) -> Steps:
    """PyTorch's exporter, of logits without a cache, at 32 bits."""
    model = _open(folder, trust)
    yield "opened", model
    out.mkdir()
    file, ids = str(out / "model.onnx"), _ids(folder)
    torch.onnx.export(_LogitsAlone(model), (ids,), file, input_names=["ids"], dynamo=True, verbose=False)
    session = import_module("onnxruntime").InferenceSession(file)
    yield "written", _Answers(lambda ids: torch.from_numpy(session.run(None, {"ids": ids.numpy()})[0]))


def _cache(backend: str) -> Tool:
    """transformers' own quantized cache at 4 bits, over weights as they are."""

    def tool(folder: str, trust: bool, out: Path) -> Steps:
        model = _open(folder, trust)
        yield "opened", model
        cache_class = import_module("transformers").QuantizedCache

        def answer(ids: Tensor) -> Tensor:
            cache = cache_class(backend, model.config, nbits=4, q_group_size=32, residual_length=8)
            half = ids.shape[1] // 2
            pieces = [ids[:, :half], *ids[:, half:].split(1, 1)]
            return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)

        yield "quantized", _Answers(answer)

    return tool


TOOLS: dict[str, Tool] = {
    "bitsandbytes nf4": _bitsandbytes,
    "torchao int8": _torchao,
    "llm-compressor, nearest W4A16": _llm_compressor,
    "llm-compressor, GPTQ W4A16": _llm_compressor_gptq,
    "AutoRound W4A16": _auto_round,
    "HQQ 4 bits, by transformers": _hqq_by_transformers,
    "HQQ 4 bits": _hqq,
    "quanto int4": _quanto,
    "ModelOpt int4": _model_optimizer,
    "transformers' QuantizedCache, quanto": _cache("quanto"),
    "transformers' QuantizedCache, HQQ": _cache("hqq"),
    "torch.onnx.export": _torch_onnx,
}


class _LogitsAlone(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


class _Answers:
    """Logits of something that is no model of transformers."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        self.answer = answer


def _while_opening(folder: str, trust: bool, out: Path, config: Any) -> Steps:
    model = _open(folder, trust, quantization_config=config, device_map="cpu")
    yield "quantized", model
    model.save_pretrained(out)
    yield "written", model


def _oneshot(folder: str, trust: bool, out: Path, modifier: Any, dataset: Any) -> Steps:
    model = _open(folder, trust)
    yield "opened", model
    more = (
        {} if dataset is None else {"dataset": dataset, "max_seq_length": _LENGTH, "num_calibration_samples": _WINDOWS}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    import_module("llmcompressor").oneshot(
        model=model, tokenizer=tokenizer, recipe=modifier, trust_remote_code_model=trust, **more
    )
    yield "quantized", model
    model.save_pretrained(out, save_compressed=True)
    yield "written", model


def _config(name: str) -> Any:
    return getattr(import_module("transformers"), name)


def _open(folder: str | Path, trust: bool, **options: Any) -> Any:
    options = {"dtype": torch.float32, "trust_remote_code": trust} | options
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _ids(folder: str) -> Tensor:
    """Tokens that calibrate and that are scored: random ones, of a random model."""
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    return torch.randint(vocabulary, (_WINDOWS, _LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    answer: Tensor = model.answer(ids) if isinstance(model, _Answers) else model(ids).logits
    return answer.float()


def _kl(reference: Tensor, logits: Tensor) -> float:
    """Mean KL divergence of next-token distributions from the reference's, in nats."""
    expected, found = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def _linears(model: Any) -> dict[str, Any]:
    """Linear layers of a model by name, without the head."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: module for name, module in found.items() if not name.endswith("lm_head")}


def _quantized_share(reference: Any, model: Any) -> list[int]:
    """How many of the linear layers are of another class, or have other weights, and of how many."""
    modules = dict(model.named_modules())
    linears = _linears(reference)
    return [sum(_is_changed(linear, modules.get(name)) for name, linear in linears.items()), len(linears)]


def _is_changed(linear: Any, module: Any) -> bool:
    if type(module) is not torch.nn.Linear:
        return True
    weight = module.weight.detach()
    if type(weight.data) is not Tensor or weight.shape != linear.weight.shape:
        return True
    # What bfloat16 rounds is a fifth of this.
    return bool((weight.float() - linear.weight).norm() > 0.01 * linear.weight.norm())


def quantize(tool: str, name: str, folder: str, trust: bool, out: Path) -> dict[str, Any]:
    """Record how far a tool comes with a model."""
    row: dict[str, Any] = {"tool": tool, "model": name, "reached": None}
    try:
        reference = _open(folder, trust)
        ids = _ids(folder)
        expected = _logits(reference, ids)
    except Exception as error:
        # The tool is asked all the same, and gives its own reason.
        reference, row["reference_error"] = None, _first_line(error)
    try:
        for step, model in TOOLS[tool](folder, trust, out):
            row["reached"] = step
            if step != "opened" and reference is not None and "kl" not in row:
                row["kl"] = _kl(expected, _logits(model, ids))
                if not isinstance(model, _Answers):
                    row["linears"] = _quantized_share(reference, model)
    except Exception as error:
        row["error"] = _first_line(error)
    return row


def reopen(tool: str, name: str, folder: str, trust: bool, out: Path) -> dict[str, Any]:
    """Record whether stock transformers opens what a tool wrote."""
    row: dict[str, Any] = {"tool": tool, "model": name}
    try:
        ids = _ids(folder)
        model = _open(out, trust)
        row["kl_reopened"] = _kl(_logits(_open(folder, trust), ids), _logits(model, ids))
        row["linears_reopened"] = _quantized_share(_open(folder, trust), model)
        row["reached"] = "reopened"
    except Exception as error:
        row["error"] = _first_line(error)
    return row


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:200]


def main(models: str, written: str, *tools: str) -> None:
    """Print a line of JSON for each tool, model and step."""
    # A fork has transformers imported, and no other tool.
    fork = multiprocessing.get_context("fork")
    for tool in tools:
        for measure in (quantize, reopen):
            process = fork.Process(target=_measure_all, args=(measure, tool, models, Path(written) / tool))
            process.start()
            process.join(_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _measure_all(measure: Callable[..., dict[str, Any]], tool: str, models: str, written: Path) -> None:
    written.mkdir(exist_ok=True)
    for name, (folder, trust) in json.loads(Path(models).read_text()).items():
        out = written / name
        if measure is quantize or (out / "config.json").exists():
            torch.manual_seed(0)
            row = measure(tool, name, folder, trust, out)
            # Some tools leave a line unfinished.
            print("\nROW " + json.dumps(row | {"diffquant_imported": "diffquant" in sys.modules}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

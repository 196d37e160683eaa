"""Folders that other libraries quantized, against what those libraries themselves make of the same bytes."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.quantization.loading import load
from tests.support.checkpoints import edit_json, write_llama
from tests.support.models import random_llama
from tests.support.oracles import agrees
from tests.support.tables import in_one_test

UP = "model.layers.0.mlp.up_proj"


def packed_alone(folder, tensors, **entry):
    """A Llama's folder with one module as a library packed it; what it is read as."""
    write_llama(folder, torch.float16, num_hidden_layers=1)
    save_file({f"{UP}.{part}": data.contiguous() for part, data in tensors.items()}, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config=entry)
    return open_checkpoint(folder).read(f"{UP}.weight")


@pytest.mark.parametrize("order", ["neighbours", "any"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_as_auto_round_packs_and_multiplies_it(tmp_path, version, bits, order):
    file = "qlinear_torch_zp" if version == "gptq" else "qlinear_torch"
    peer = pytest.importorskip(f"auto_round_extension.torch.{file}", reason="needs the extra quantizers")
    generator = torch.Generator().manual_seed(bits)
    inputs, outputs, size = 96, 64, 32
    linear = nn.Linear(inputs, outputs, bias=False)
    scales = torch.rand(outputs, 3, generator=generator).half().float() * 0.1 + 0.01
    zeros = torch.randint(1, 2**bits, (outputs, 3), generator=generator)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator)
    with torch.no_grad():
        linear.weight.copy_((codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1))
    layer = peer.QuantLinear(bits, size, inputs, outputs, False, g_idx=True)
    # Its packing asks for what it does not set.
    layer.device = torch.device("cpu")
    layer.pack(linear, scales, zeros, None, "cpu")
    if order == "any":
        layer.g_idx = layer.g_idx[torch.randperm(inputs, generator=generator)]
    tensors = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
    ours = packed_alone(
        tmp_path / "folder", tensors, quant_method="gptq", bits=bits, group_size=size, checkpoint_format=version
    )
    unit = torch.eye(inputs)
    agrees("AutoRound", f"{version}: weights read", ours.half().float(), layer(unit).T)
    layer.scales = layer.scales.float()
    agrees("AutoRound", f"{version}: weights read", ours, layer(unit).T)


def test_awq_as_auto_round_packs_and_unpacks_it(tmp_path):
    peer = pytest.importorskip("auto_round.export.export_to_awq.utils", reason="needs the extra quantizers")
    generator = torch.Generator().manual_seed(0)
    inputs, outputs, size = 96, 64, 32
    linear = nn.Linear(inputs, outputs, bias=False).half()
    scales = torch.rand(outputs, 3, generator=generator).half() * 0.1 + 0.01
    zeros = torch.randint(0, 16, (outputs, 3), generator=generator)
    layer = peer.WQLinear_GEMM.from_linear(linear, 4, size, False, scales.T.contiguous(), zeros.T.contiguous())
    tensors = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
    ours = packed_alone(tmp_path / "folder", tensors, quant_method="awq", bits=4, group_size=size, version="gemm")
    theirs = peer.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, size)
    assert theirs.dtype == torch.float16
    agrees("AutoRound", "awq: weights read", ours.half(), theirs.T)
    theirs = peer.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, size)
    agrees("AutoRound", "awq: weights read", ours, theirs.T)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True], ids=["float scales", "nested scales"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("rows", "width", "block"), [(64, 96, 64), (34, 30, 128), (7, 4096, 64)])
def test_four_bits_as_bitsandbytes_packs_and_unpacks_them(tmp_path, rows, width, block, kind, nested, storage):
    peer = pytest.importorskip("bitsandbytes.functional", reason="needs the extra quantizers")
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, state = peer.quantize_4bit(weight, None, None, block, nested, kind, storage)
    parts = {f"weight.{name}": data for name, data in state.as_dict(packed=True).items()} | {"weight": codes}
    ours = packed_alone(tmp_path / "folder", parts, quant_method="bitsandbytes", load_in_4bit=True)
    # As one row: with AVX-512 bitsandbytes 0.50 misreads blocks that go on in the next row, by more than rounding lost.
    state.shape = torch.Size([rows * width])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = dtype
        theirs = peer.dequantize_4bit(codes, state).reshape(rows, width)
        agrees("bitsandbytes", f"{kind}: weights read", ours.to(dtype), theirs)


def test_int8_as_bitsandbytes_packs_and_unpacks_it(tmp_path):
    peer = pytest.importorskip("bitsandbytes.functional", reason="needs the extra quantizers")
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).half()
    codes, scales, _ = peer.int8_vectorwise_quant(weight)
    parts = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    ours = packed_alone(tmp_path / "folder", parts, quant_method="bitsandbytes", load_in_8bit=True)
    agrees("bitsandbytes", "int8: weights read", ours, peer.int8_vectorwise_dequant(codes, scales))
    assert (ours - weight).abs().max() < 0.02


FP8 = ("FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG")
NVFP4 = ("NVFP4_DEFAULT_CFG", "NVFP4_DEFAULT_CFG, FP8_KV_CFG", "NVFP4_MLP_ONLY_CFG")
MODELOPT = dict.fromkeys(FP8, "FP8") | dict.fromkeys(NVFP4, "NVFP4")
MODELOPT |= {"MXFP8_DEFAULT_CFG": "MXFP8", "W4A8_MXFP4_FP8_CFG": "MXFP4"}


@in_one_test("config", MODELOPT)
def test_a_folder_that_modelopt_exports_is_read_as_modelopt_dequantizes_it(tmp_path, config):
    quantizer = pytest.importorskip("modelopt.torch.quantization", reason="needs the extra quantizers")
    from modelopt.torch.export import export_hf_checkpoint

    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"]}
    model = random_llama(**sizes, **heads).bfloat16()
    recipe, *caches = (copy.deepcopy(getattr(quantizer, name)) for name in config.split(", "))
    if caches:
        recipe = quantizer.utils.update_quant_cfg_with_kv_cache_quant(recipe, caches[0]["quant_cfg"])
    quantizer.quantize(model, recipe, lambda each: each(torch.arange(32)[None]))
    export_hf_checkpoint(model, export_dir=tmp_path / "folder")
    stored, kind = load_file(tmp_path / "folder" / "model.safetensors"), MODELOPT[config]
    source = open_source(tmp_path / "folder")
    packed = [name for name in source.checkpoint.tensors if f"{name}_scale" in stored]
    assert len(packed) == (6 if "MLP" in config else 14)
    for name in packed:
        theirs = by_modelopt(kind, stored[name], stored[f"{name}_scale"], stored.get(f"{name}_scale_2"))
        agrees("ModelOpt", f"{kind}: weights read", source.checkpoint.read(name), theirs)
    assert source.checkpoint.earlier_format == f"ModelOpt {kind}"
    assert ("keys and values" in source.checkpoint.engine_difference_note) == ("KV" in config)
    assert torch.isfinite(load(tmp_path / "folder", dtype=torch.float32)(torch.arange(9)[None]).logits).all()


def by_modelopt(kind, codes, scale, above):
    """What ModelOpt's own tensors dequantize codes to, in float32."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    shape = torch.Size((codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)))
    if kind == "NVFP4":
        tensor = NVFP4QTensor(shape, torch.float32, codes)
        return tensor.dequantize(torch.float32, scale=scale, double_scale=above, block_sizes={-1: 16})
    if kind == "MXFP4":
        return MXFP4QTensor(shape, torch.float32, codes).dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
    if kind == "MXFP8":
        return MXFP8QTensor(shape, torch.float32, codes).dequantize(torch.float32, scale=scale)
    tensor = FP8QTensor(shape, torch.float32, codes)
    if scale.dim() == 4:
        blocks = {-1: 128, -2: 128}
        return tensor.dequantize(torch.float32, scale=scale.reshape(shape[0] // 128, -1), block_sizes=blocks)
    scale = scale[:, None] if scale.dim() == 1 else scale
    return tensor.dequantize(torch.float32, scale=scale)

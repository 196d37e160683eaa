"""`verify` refuses an export with a fault in it, wherever the fault is, and refuses no sound one."""

import os
import shutil

import numpy as np
import pytest
from onnx import helper, numpy_helper

from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.data import pocket_models
from diffquant.errors import ToleranceError
from diffquant.onnx import ExportOptions, export, verify
from diffquant.onnx.graph.op import CONTRIB
from diffquant.onnx.native import build as native_build
from diffquant.onnx.native.build import LIBRARY, SOURCES, build, find_compiler
from diffquant.onnx.verification import arithmetic, passages
from diffquant.recipe import Recipe
from tests.support.native_kernels import count_attention_calls
from tests.support.planted import (
    LAYER,
    PlantedExport,
    batch_turned,
    cache_emptied,
    emptied,
    gathered,
    pairs_swapped,
    present,
    row_overwritten,
    scales_larger,
    weight,
    with_rows,
)
from tests.support.thorough import sampled

LOW = {"weights": "4:g32", "kv_bits": 8, "embed_bits": 8}
BASES = {
    "v1": ("unilm-v1-plain", LOW),
    "v1, a key for each map": ("unilm-v1", LOW),
    "v2": ("unilm-v2-half", LOW),
    "untied": ("unilm-v2", LOW),
    "float32": ("unilm-v1", {}),
    "float16": ("unilm-v2-half", {"dtype": "float16", "kv_bits": 8}),
    "standard": ("unilm-v2-half", {"logits": "6:row"}),
    "standard, portable": ("unilm-v2-half", {"logits": "6:row", "portable": True}),
    "llama": ("llama", LOW),
    "long": ("unilm-v2-half", LOW),
    "no cache": ("unilm-v1", {"cache": False}),
    "spanning logits": ("unilm-v2-half", LOW | {"logits": "6:tensor"}),
    "portable": ("unilm-v2-half", LOW | {"portable": True}),
}
# Beyond the passages that these tests read, and beyond the default context of their models.
CONTEXTS = {"long": 512, "portable": 512}


@pytest.fixture
def exported(made):
    """A function from the name of a base to its checkpoint and its sound export."""
    return lambda base: made(BASES[base][0], CONTEXTS.get(base), **BASES[base][1])


def scaled(name, by):
    return lambda e: e.change(name, lambda x: (x * np.float32(by)).astype(x.dtype))


def every_fourth(name, by):
    return lambda e: e.change(name, lambda x: x * np.where(np.arange(x.shape[-1]) % 4 == 0, by, 1).astype(x.dtype))


def rolled(name, axis=0, shift=1):
    return lambda e: e.change(name, lambda x: np.roll(x, shift, axis))


def reordered(*names, rows):
    """Exchange equal blocks of rows: `rows` says which block comes where."""

    def edit(e):
        for name in names:
            e.change(name, lambda x: x.reshape(len(rows), -1)[list(rows)].reshape(x.shape))

    return edit


def skipped(output, source):
    """Make a value a copy of another."""

    def edit(e):
        node = e.node(output)
        node.CopyFrom(helper.make_node("Identity", [source], [output]))

    return edit


def given(output, place, value):
    """Give the node that makes `output` another input."""

    def edit(e):
        e.node(output).input[place] = value

    return edit


def of_every_layer(edit):
    return lambda e: [edit(e, present(part, layer)) for layer in (0, 1) for part in ("key", "value")]


def zero_point_of_7(e):
    matrix = weight("down")
    node = next(node for node in e.model.graph.node if f"{matrix}_codes" in node.input)
    rows, blocks = next(list(t.dims) for t in e.model.graph.initializer if t.name == f"{matrix}_scale")
    points = np.full((rows, -(-blocks // 2)), 0x77, np.uint8)
    e.model.graph.initializer.append(numpy_helper.from_array(points, "points"))
    # Ours has no zero points; what reads codes by ONNX Runtime's op has.
    node.domain = CONTRIB
    node.input.append("points")


def one_code(e):
    def edit(codes):
        codes.reshape(-1)[5] ^= 1
        return codes

    e.change(f"{weight('v')}_codes", edit)


def all_visible(e):
    """Count the tokens of a mask of ones in place of the mask."""
    one = helper.make_tensor("one", 7, [1], [1])
    nodes = [
        helper.make_node("Shape", ["attention_mask"], ["mask.shape"]),
        helper.make_node("ConstantOfShape", ["mask.shape"], ["mask.ones"], value=one),
    ]
    e.node("Slice").input[0] = e.node("ReduceSum").input[0] = "mask.ones"
    for node in reversed(nodes):
        e.model.graph.node.insert(0, node)


def base_of_20000(e):
    half = 16

    def turn(function):
        def edit(table):
            width = table.shape[1]
            frequencies = 20000.0 ** -(np.arange(half // 2) / (half // 2))
            angles = np.arange(len(table))[:, None] * frequencies
            return np.tile(function(angles), (1, width // (half // 2))).astype(table.dtype)

        return edit

    e.change("cos_cache", turn(np.cos))
    e.change("sin_cache", turn(np.sin))


def body_node(e, op, index=0):
    return [node for node in e.body.node if node.op_type == op][index]


def body_adds_the_noise(e):
    body_node(e, "Sub", -1).op_type = "Add"


def body_without_rotation(e):
    for _ in ("queries", "keys"):
        node = body_node(e, "RotaryEmbedding")
        turned = node.output[0]
        node.CopyFrom(helper.make_node("Identity", [node.input[0]], [turned]))


def body_position_late(e):
    """Rotate the queries of the standard body, which is written out, as if they stood one place later."""
    e.constants(one_place=[1])
    nodes = e.model.graph.node
    gathers = [node for node in nodes if node.output and node.output[0].startswith(("query_cos_all", "query_sin_all"))]
    for place in dict.fromkeys(node.input[1] for node in gathers):
        turned = [node for node in gathers if node.input[1] == place]
        at = list(nodes).index(turned[0])
        for node in turned:
            node.input[1] = f"{place}_later"
        nodes.insert(at, helper.make_node("Add", [place, "one_place"], [f"{place}_later"]))


def one_scaled(name, by):
    """Multiply one entry of a tensor."""

    def edit(values):
        values.reshape(-1)[3] *= by
        return values

    return lambda e: e.change(name, edit)


def unrotated_from(position):
    """Tables that turn nothing from a position on."""

    def late(value):
        return lambda table: np.where(np.arange(len(table))[:, None] >= position, value, table).astype(table.dtype)

    return lambda e: [e.change("cos_cache", late(1)), e.change("sin_cache", late(0))]


def one_sine(table):
    table[-1, 2] += 0.01
    return table


def window_of(size, layer):
    """A window in one layer alone."""
    return lambda e: e.set_attribute("local_window_size", size, [e.node(f"layers.{layer}.attention")])


def no_first_call_of_one_token(e):
    """Count two tokens at least."""
    e.constants(at_least=[1])
    e.behind("Where", lambda before, after: [helper.make_node("Max", [before, "at_least"], [after])])


def read_at(*inputs):
    """Have the head read the difference of two values as places, in folders that give the last position alone."""

    def edit(e):
        e.constants(**{"read.one": [1], "read.nothing": [0]})
        index, place = e.node("Unsqueeze"), e.node("Unsqueeze").input[0]
        nodes = [
            helper.make_node("Sub", [each or place for each in inputs], ["read.difference"]),
            # In the shape of the places.
            helper.make_node("Mul", [place, "read.nothing"], ["read.zeros"]),
            helper.make_node("Add", ["read.difference", "read.zeros"], ["read.places"]),
        ]
        at = list(e.model.graph.node).index(index)
        for node in reversed(nodes):
            e.model.graph.node.insert(at, node)
        index.input[0] = "read.places"

    return edit


def in_place_of(name, value):
    """Give out a value of the graph where a node computes another."""

    def edit(e):
        node = e.node(name)
        node.CopyFrom(helper.make_node("Identity", [value or node.input[0]], node.output, name=node.name))

    return edit


def fails_behind_a_token(e):
    """A graph that opens, and runs as long as nothing is cached."""
    e.constants(no_rows=[0], keys_axis=[2], zero=[0])
    past = "past_key_values.1.key"
    nodes = [
        helper.make_node("Shape", [past], ["rows"], start=2, end=3),
        # An index beyond the one entry that there is.
        helper.make_node("Gather", ["zero", "rows"], ["nothing"]),
        helper.make_node("Add", ["rows.mask", "nothing"], ["rows.masked"]),
    ]
    e.model.graph.node.insert(0, helper.make_node("Identity", ["attention_mask"], ["rows.mask"]))
    for node in reversed(nodes):
        e.model.graph.node.insert(1, node)
    e.node("ReduceSum").input[0] = "rows.masked"


def exchanged(e, first, second):
    tensors = {tensor.name: tensor for tensor in e.model.graph.initializer}
    tensors[first].name, tensors[second].name = second, first


N = f"layers.{LAYER}"
FAULTS = {
    # The cache.
    "one layer's cache emptied after every call": ("v2", cache_emptied),
    "one layer's keys alone emptied": ("v1", lambda e: emptied(e, present("key"))),
    "a cache row overwritten in all layers": ("v2", row_overwritten),
    "values one row late": ("v1", lambda e: with_rows(e, present("value"), (0, 1), (0, -1))),
    "the newest row lost": ("v2", lambda e: with_rows(e, present("key"), (0, -1), (-2, -1))),
    "a KV head replaced by another": ("v2", lambda e: gathered(e, present("value"), 1, [1, 1])),
    "KV heads swapped in the cache": ("llama", lambda e: gathered(e, present("key"), 1, [1, 0])),
    "cache not reordered for the batch": ("v1", of_every_layer(batch_turned)),
    "one layer's cache not reordered for the batch": ("llama", lambda e: batch_turned(e, present("value"))),
    "value channels one place off": ("float32", lambda e: gathered(e, present("value"), 3, [*range(1, 32), 0])),
    "padding counted as tokens": ("v1", all_visible),
    "cache scales eight times too large": ("v2", scaled(f"{N}.k_scale", 8)),
    "cache scales four times too small": ("v1", scaled(f"{N}.v_scale", 0.25)),
    "cache scales that clip every fourth channel": ("llama", every_fourth(f"{N}.k_scale", 1 / 16)),
    "a cache's scales x 1.02": ("v2", scaled(f"{N}.v_scale", 1.02)),
    "one channel's scale x 1.5": ("llama", one_scaled(f"{N}.k_scale", 1.5)),
    "a cache emptied where logit scales span rows": ("spanning logits", cache_emptied),
    "a first call of one token counted as two": ("v2", no_first_call_of_one_token),
    "a cache row overwritten in a portable folder": ("portable", row_overwritten),
    "padding counted as tokens in a portable folder": ("portable", all_visible),
    "a graph that cannot run behind a token": ("untied", fails_behind_a_token),
    # Weights.
    "scales x 1.05": ("v2", scales_larger),
    "scales of one row x 1.05": (
        "v1",
        lambda e: e.change(
            f"{weight('o')}_scale", lambda x: x * np.where(np.arange(len(x)) == 3, 1.05, 1)[:, None].astype("f4")
        ),
    ),
    "another zero point": ("v1", zero_point_of_7),
    "one code off by one": ("v2", one_code),
    "rows off by one": ("v1", rolled(f"{weight('gate')}_codes")),
    "swapped query pairs": ("v2", pairs_swapped),
    "signal and noise swapped": ("float32", reordered(f"{weight('q')}", rows=(1, 0, 3, 2))),
    "KV heads swapped in their weights": ("v2", reordered(f"{weight('k')}_codes", f"{weight('k')}_scale", rows=(1, 0))),
    "gate and up exchanged": ("float32", lambda e: exchanged(e, weight("gate"), weight("up"))),
    "a key's bias dropped": ("v1", scaled(f"{weight('k').removesuffix('.weight')}.bias", 0)),
    "a network's bias dropped": ("v2", scaled(f"{weight('up').removesuffix('.weight')}.bias", 0)),
    "embedding scales x 1.05": ("untied", scaled("model.embed_tokens.weight_scale", 1.05)),
    "head scales x 1.05": ("untied", scaled("lm_head.weight_scale", 1.05)),
    "the head's rows off by one": ("untied", rolled("lm_head.weight_codes")),
    "another embedding's row": ("untied", rolled("model.embed_tokens.weight_codes")),
    "a float16 weight x 1.1": ("float16", scaled(weight("v"), 1.1)),
    "a weight that is not a number": ("float32", one_scaled("model.norm.weight", np.nan)),
    # Arithmetic.
    "another λ in V1": ("v1", scaled(f"{N}.lambda", 1.05)),
    "another λ in V2": ("v2", scaled(f"{N}.lambda_proj", 1.2)),
    "the layer before another's λ": ("float32", given(f"{N}.attention", 3, "layers.0.lambda")),
    "1 - λ_init dropped": ("v1", scaled(f"{N}.post_norm", 1 / 0.6)),
    "a norm missing": ("v2", skipped(f"{N}.RMSNormalization", "layers.0.output")),
    "the final norm missing": ("v1", skipped("RMSNormalization", "layers.1.output")),
    "a pair's norm missing": ("float32", skipped(f"{N}.RMSNormalization_2", f"{N}.Reshape")),
    "another epsilon": ("v2", lambda e: e.set_attribute("epsilon", 1e-2, [e.node(f"{N}.RMSNormalization")])),
    "a rectangle for the sigmoid's gate": (
        "v1",
        given(f"{N}.Mul", 1, f"{weight('gate').removesuffix('.weight')}.product"),
    ),
    "a layer left out": ("v2", skipped(f"{N}.output", "layers.0.output")),
    "a layer's attention left out": ("llama", skipped(f"{N}.Add", "layers.0.output")),
    "a residual left out": ("v1", given(f"{N}.output", 0, "layers.0.output")),
    "attention scale x 1.01 in one layer": (
        "v1",
        lambda e: e.set_attribute("scale", 1.01 * 16**-0.5, [e.node(f"layers.{LAYER}.attention")]),
    ),
    "attention scale x 1.1": ("v2", lambda e: e.set_attribute("scale", 1.1 * 16**-0.5)),
    "a Transformer's attention scale x 1.1": ("llama", lambda e: e.set_attribute("scale", 1.1 * 16**-0.5)),
    "a window of 16": ("float32", lambda e: e.set_attribute("local_window_size", 16)),
    "rotation of other channels": ("v2", lambda e: e.set_attribute("rotary_interleaved", 1)),
    "cosines shifted by one": ("v1", rolled("cos_cache")),
    "another RoPE base": ("v2", base_of_20000),
    "no rotation from position 300 on": ("long", unrotated_from(300)),
    "no rotation from position 60 on, without a cache": ("no cache", unrotated_from(60)),
    "one angle wrong at the last position": ("long", lambda e: e.change("sin_cache", one_sine)),
    "no rotation from position 300 on in a portable folder": ("portable", unrotated_from(300)),
    "a window of 250 in one layer": ("long", window_of(250, LAYER)),
    "a window of 40 in one layer, without a cache": ("no cache", window_of(40, LAYER)),
    "the last place read where a shorter sequence has padding": ("v1", read_at("Shape", "read.one")),
    "a prompt's last position but one": ("standard", read_at("", "read.one")),
    "tokens not moved before padding on the left": ("v2", in_place_of("GatherElements", "input_ids")),
    "logits not moved back to their columns": ("no cache", in_place_of("states_read", "")),
    # The function body, which stock ONNX Runtime computes.
    "body: the noise is added": ("v1", body_adds_the_noise),
    "body: no rotation": ("v2", body_without_rotation),
    "body: no rotation in a Transformer": ("llama", body_without_rotation),
    "standard body: queries rotated one place late": ("standard, portable", body_position_late),
}


# A body has these numbers written into it, or tells them from shapes: the native kernel alone is misled.
OF_THE_KERNEL = {
    "a first call of one token counted as two",
    "a window of 16",
    "a window of 250 in one layer",
    "a window of 40 in one layer, without a cache",
}


@pytest.mark.parametrize("fault", sampled(FAULTS, 3))
def test_a_planted_fault_is_refused(exported, tmp_path, request, fault):
    if fault in OF_THE_KERNEL:
        request.getfixturevalue("library")
    base, edit = FAULTS[fault]
    checkpoint, folder = exported(base)
    planted = PlantedExport.copy(folder, tmp_path / "planted")
    edit(planted)
    planted.save()
    with pytest.raises(ToleranceError):
        verify(planted.folder, checkpoint, threads=1)


# Lines of the kernel's C++, each with a fault that is there where DIFFQUANT_FAULT has its number.
NATIVE = {
    "keys rotated one place late": ("attend.h", "rotation.move_to(position);", "rotation.move_to(position + FAULT);"),
    "a token does not see itself": (
        "attend.h",
        "const int64_t end = problem_.start[block_.sequence] + token(row) + 1;",
        "const int64_t end = larger<int64_t>(problem_.start[block_.sequence] + token(row) + !FAULT, 1);",
    ),
    "a newest key lost in decoding": (
        "attend.h",
        "weighed_rows<V, row_count>(weights, smaller(count, seen),",
        "weighed_rows<V, row_count>(weights, smaller(count, seen) - (FAULT && problem_.tokens == 1),",
    ),
    "the noise's λ of another pair": (
        "attend.h",
        "problem_.lambda[problem_.lambda_per_pair ? at : 0]",
        "problem_.lambda[problem_.lambda_per_pair ? (FAULT ? index(0) : at) : 0]",
    ),
    "queries scaled for the first map's keys": (
        "attend.h",
        "scale[problem_.key_offset(map) + c] : 1.0f",
        "scale[problem_.key_offset(FAULT ? 0 : map) + c] : 1.0f",
    ),
    "one scale for all value channels": ("attend.h", "sums[c] *= scale[c]", "sums[c] *= scale[FAULT ? 0 : c]"),
    "one map's weights that do not add up to 1": (
        "softmax.h",
        "V::store(at, V::mul(V::load(at), share));",
        "V::store(at, V::mul(V::load(at), FAULT ? V::mul(share, V::broadcast(1.01f)) : share));",
    ),
    "values of the batch's first sequence": (
        "attend.h",
        "read_rows<V>(problem_.values, block_.sequence,",
        "read_rows<V>(problem_.values, FAULT ? 0 : block_.sequence,",
    ),
    "a scale one hundredth off": (
        "attend.h",
        "to[c] * problem_.scale * key_scales_[c]",
        "to[c] * problem_.scale * key_scales_[c] * (FAULT ? 1.01f : 1.0f)",
    ),
    "the past's last row not copied": (
        "node.cc",
        "std::copy_n(from + i * bytes, bytes,",
        "std::copy_n(from + i * bytes, FAULT ? bytes - cache->row_bytes() : bytes,",
    ),
    "codes cut off where they should be rounded": (
        "rows.h",
        "x[i] = round_half_even(smaller(larger(x[i] / scale[i], -largest), largest));",
        "x[i] = FAULT ? static_cast<int>(smaller(larger(x[i] / scale[i], -largest), largest))"
        " : round_half_even(smaller(larger(x[i] / scale[i], -largest), largest));",
    ),
    "a past in place forgotten": (
        "node.cc",
        "if (from == cache->data) continue;",
        "if (from == cache->data) { if (FAULT) std::fill_n(cache->data, cache->row_bytes(), uint8_t{0}); continue; }",
    ),
}
OTHER_BASES = {
    "the noise's λ of another pair": "v2",
    "queries scaled for the first map's keys": "v1, a key for each map",
    "one map's weights that do not add up to 1": "llama",
}


@pytest.fixture(scope="module")
def faulty_kernel(tmp_path_factory):
    """The kernel with all of `NATIVE` in it, built once."""
    compiler = find_compiler()
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("there is no C++ compiler, and so nobody knows whether a faulty kernel is caught")
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    for file in [*SOURCES.glob("*.cc"), *SOURCES.glob("*.h")]:
        shutil.copy(file, folder)
    for number, (file, right, wrong) in enumerate(NATIVE.values(), 1):
        source = (folder / file).read_text()
        assert source.count(right) == 1, right
        (folder / file).write_text(source.replace(right, wrong.replace("FAULT", f"(diffquant_fault() == {number})")))
    problem = folder / "problem.h"
    problem.write_text(
        problem.read_text().replace(
            "#include <cstdint>",
            "#include <cstdint>\n#include <cstdlib>\n"
            'static inline int diffquant_fault() { return std::atoi(std::getenv("DIFFQUANT_FAULT")); }',
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        # Half the time to compile, and the same arithmetic.
        patch.setattr(native_build, "_FLAGS", ["-O1" if flag == "-O3" else flag for flag in native_build._FLAGS])
        build(folder / LIBRARY, compiler, sources=folder)
    return folder / LIBRARY


@pytest.mark.parametrize("fault", sampled([None, *NATIVE], 4))
def test_a_fault_in_the_native_kernel_is_refused(exported, faulty_kernel, monkeypatch, fault):
    monkeypatch.setenv("DIFFQUANT_NATIVE_LIBRARY", str(faulty_kernel))
    monkeypatch.setenv("DIFFQUANT_FAULT", str(1 + list(NATIVE).index(fault) if fault else 0))
    checkpoint, folder = exported(OTHER_BASES.get(fault, "v1"))
    calls = count_attention_calls()
    if fault is None:
        assert verify(folder, checkpoint, threads=1).passed
    else:
        with pytest.raises(ToleranceError):
            verify(folder, checkpoint, threads=1)
    assert count_attention_calls() > calls


SOUND = {
    "V1, float32": ("unilm-v1", {}),
    "V1, 4 bits, cache 8, embedding 8": ("unilm-v1-plain", LOW),
    "V1, 6 bits, cache 4": ("diffllama", {"weights": "6:row", "kv_bits": 4}),
    "V1, 4-bit logits": ("unilm-v1", {"logits": "4:row", "kv_bits": 8}),
    "V1, 4-bit logits with a scale per pair": ("unilm-v1", {"logits": "4:pair", "kv_bits": 8}),
    "V1, 3-bit logits with a scale per head, shifted": ("diffllama", {"logits": "3:head:shift"}),
    "V1, no cache": ("unilm-v1", {"cache": False, "weights": "4:g32"}),
    "V2, float32": ("unilm-v2", {}),
    "V2, 8 bits, cache 8": ("unilm-v2", {"weights": "8:g32", "kv_bits": 8}),
    "V2, 4 bits exact, cache 8": ("unilm-v2-half", {"weights": "4:g32", "kv_bits": 8, "accuracy_level": 1}),
    "V2, float16": ("unilm-v2-half", {"dtype": "float16"}),
    "V2, float16, 4 bits, cache 8, embedding 8": ("unilm-v2-half", LOW | {"dtype": "float16"}),
    "V2, 4-bit logits with a scale per tensor": ("unilm-v2", {"logits": "4:tensor", "weights": "8:g32"}),
    "V2, 6-bit logits with a scale per tensor, 4 bits": ("unilm-v2-half", {"logits": "6:tensor", "weights": "4:g32"}),
    "V2, 4-bit logits per tensor, no cache": ("unilm-v2-half", {"logits": "4:tensor", "cache": False}),
    "V2, logits, 4 bits, cache 4": ("unilm-v2-half", {"logits": "8:row", "weights": "4:g32", "kv_bits": 4}),
    "Transformer, float32": ("llama", {}),
    "Transformer, 4 bits, cache 8, embedding 8": ("llama", LOW),
}


@pytest.mark.parametrize("name", sampled(SOUND, 3))
def test_no_sound_export_is_refused(made, monkeypatch, name):
    monkeypatch.setattr(passages, "LONGEST", 160)
    monkeypatch.setattr(passages, "POSITIONS", 512)
    source, options = SOUND[name]
    checkpoint, folder = made(source, **options)
    assert verify(folder, checkpoint, threads=1).passed


@pytest.mark.parametrize("checkpoint", sampled(pocket_models("prose"), 3), ids=lambda path: path.name)
def test_no_sound_export_of_a_trained_model_is_refused(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setattr(passages, "LONGEST", 160)
    monkeypatch.setattr(passages, "POSITIONS", 512)
    options = ExportOptions.parse(**LOW | {"weights": "4:row"})
    # Ranges of random tokens would not fit prose, which verify says.
    ranges = calibrate_cache(checkpoint, Recipe(weights=options.weights))
    export(checkpoint, tmp_path / "out", options, ranges=ranges)
    verification = verify(tmp_path / "out", checkpoint, threads=1)
    assert verification.positions >= 512
    rounded, exact = list(verification.tokens.values())[:2]
    assert rounded.low < rounded.agreement < exact.agreement
    assert "export with accuracy_level=1" in str(verification)


def test_activations_rounded_by_an_unknown_rule_are_held_to_what_rounding_costs(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(arithmetic, "find_activation_rounding", lambda bits, block: None)
    checkpoint, folder = exported("v1")
    verification = verify(folder, checkpoint, threads=1)
    assert "by an unknown rule" in str(verification)
    planted = PlantedExport.copy(folder, tmp_path / "planted")
    scaled(f"{weight('up')}_scale", 1.05)(planted)
    planted.save()
    with pytest.raises(ToleranceError, match="float32 products"):
        verify(planted.folder, checkpoint, threads=1)

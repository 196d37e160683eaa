"""The study of faults in a trained model's export, on a small one with random weights."""

from diffquant.onnx import ExportOptions, export
from research.studies.planted_faults import SOUND, verified_with
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import cache_ranges
from tests.support.planted import LAYER


def test_the_study_of_a_trained_models_faults_says_which_export_is_sound(tmp_path):
    checkpoint, folder = tmp_path / "model", tmp_path / "exported"
    write_checkpoint(checkpoint, "unilm-v2-half")
    options = ExportOptions.parse(weights="4:g32", kv_bits=8, embed_bits=8)
    export(checkpoint, folder, options, ranges=cache_ranges(checkpoint, options))
    said = {name: verified_with(name, LAYER, folder, checkpoint, threads=1) for name in (SOUND, "swapped query pairs")}
    assert [each["refused"] for each in said.values()] == [False, True]
    worst = [max(max(filter(None, route.values())) for route in each["routes"].values()) for each in said.values()]
    assert worst[0] <= 1 < worst[1]

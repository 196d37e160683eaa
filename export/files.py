"""Names of an exported folder's files. They stand alone: recognizing such a folder must not import onnx."""

MODEL_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
# What calibration found for a quantized cache; `diffquant calibrate` writes such files, too.
RANGES_FILE = "kv_ranges.safetensors"

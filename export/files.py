"""Names of an exported folder's files. They stand alone: recognizing such a folder must not import onnx."""

MODEL_FILE, DATA_FILE = "model.onnx", "model.onnx.data"

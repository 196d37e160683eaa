"""Names of an exported folder's files; told apart from what reads them, so that knowing a folder needs no onnx."""

MODEL_FILE, DATA_FILE = "model.onnx", "model.onnx.data"

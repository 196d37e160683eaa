"""GGUF files as llama.cpp itself computes them: what it answered is recorded, and asked again where it is installed."""

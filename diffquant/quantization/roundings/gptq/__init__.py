"""GPTQ: a run over a text that collects the layers' inputs, and the error compensation made of them."""

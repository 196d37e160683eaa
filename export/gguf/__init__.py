"""Export of Llama models to GGUF files, for llama.cpp and other programs that read them."""

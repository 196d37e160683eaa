"""Defaults of the tasks, shared by the command line and Python. No torch here."""

# Largest number of tokens per pass, cached context and padding included.
BATCH_TOKENS = 4096
# An estimate: a CUDA device reads this many about as fast as fewer, and each pass costs the host's launches.
_CUDA_BATCH_TOKENS = 16384
# Perplexity: tokens in a window, and from the start of one window to the next.
WINDOW = 1024
STRIDE = 512
# Characters of English in a token, about, by which the length of a run is estimated.
CHARACTERS_PER_TOKEN = 4
# Needle: largest number of tokens in a prompt; items per depth and length.
LENGTHS = (256,)
SAMPLES = 50


def batch_tokens_on(device: str) -> int:
    """Default for the largest number of tokens per pass on a device, such as "cuda:1"."""
    return _CUDA_BATCH_TOKENS if device.startswith("cuda") else BATCH_TOKENS

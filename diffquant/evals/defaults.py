"""Defaults of the tasks, for the command line and for Python alike. No torch here."""

# Most tokens of one pass, cached context and padding included.
BATCH_TOKENS = 4096
# A CUDA device reads so many about as fast as fewer, while each pass keeps the host launching: an estimate.
_CUDA_BATCH_TOKENS = 16384
# Tokens that perplexity sees at once, and from the start of one window to the next.
WINDOW = 1024
STRIDE = 512
# Tokens of a needle prompt at most; items of each depth and length.
LENGTHS = (256,)
SAMPLES = 50


def batch_tokens_on(device: str) -> int:
    """Most tokens of one pass on a device, such as "cuda:1", where nobody says."""
    return _CUDA_BATCH_TOKENS if device.startswith("cuda") else BATCH_TOKENS

"""Defaults of the tasks, for the command line and for Python alike. No torch here."""

# Most tokens of one pass, cached context and padding included.
BATCH_TOKENS = 4096
# Tokens that perplexity sees at once, and from the start of one window to the next.
WINDOW = 1024
STRIDE = 512
# Tokens of a needle prompt at most; items of each depth and length.
LENGTHS = (256,)
SAMPLES = 50

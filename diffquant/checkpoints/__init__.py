"""Checkpoints: folders, GGUF files and the hub, read, checked and written atomically; tokenizers and texts."""

# Raise it when a change alters stored results, which are then measured again.
RESULT_VERSION = 1

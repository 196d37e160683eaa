"""Checkpoints on disk: read, quantized, converted, each by streaming; and loaded as a model that runs.

Nothing is imported here: the verbs pull in torch, and `diffquant --help` must not.
"""

"""The Triton kernels, each with its launch code and nothing else.

They take plain tensors; `diffquant.attention` decides when they run. Nothing here imports Triton until a
kernel's own module is imported.
"""

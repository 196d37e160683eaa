"""The Triton kernels, each beside nothing but its launch code.

They take plain tensors; `diffquant.attention` decides when they run. Nothing here imports Triton until a
kernel's own module is imported.
"""

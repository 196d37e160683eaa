"""SambaY: Mamba and windowed attention in the lower layers, one full attention, gated memory and cross attention above.

Source: arXiv 2507.06607; microsoft/Phi-4-mini-flash-reasoning, whose modelling code needs a GPU and kernels.
"""

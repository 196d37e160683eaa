"""SambaY: state spaces and windows below, one full attention in the middle, and gated memory and its keys above.

Source: arXiv 2507.06607; microsoft/Phi-4-mini-flash-reasoning, whose modelling code needs a GPU and kernels.
"""

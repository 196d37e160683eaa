"""The verbs that `diffquant` has beside `load`, `quantize` and `convert`.

Each does what the command of its name does: `evaluate` what `eval` does.
"""

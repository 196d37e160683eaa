"""Measurements of speed and memory, side by side with the peers in one run.

contest/ times attention and linear layers of given shapes, programs/ whole programs, gpu/ what only a GPU shows.
Each gives cells (cells.py); run.py collects them, report.py and plots.py show them, compare.py says what changed.
"""

"""Benchmarks of speed and memory, with other implementations ("peers") measured in the same run.

contest.py checks and times implementations of attention (peers.py, decode.py) on the shapes of workloads.py; linears.py
times linear layers. A measurement is a cell (cells.py). run.py runs the sections, report.py and plots.py present the
cells.
"""

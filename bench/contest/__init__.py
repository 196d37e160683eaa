"""Attention and linear layers beside their peers, each checked before it is timed.

peers.py holds the ways to compute attention on whole prompts, decode.py those for one token over a cache, linears.py
those of a linear layer; workloads.py has the shapes, counts.py operations and bytes, contest.py checks and times.
"""

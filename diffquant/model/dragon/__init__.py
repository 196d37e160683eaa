"""The attention of Dragon and Olala (DragonLLM): grouped DIFF V2 over keys and values that are products of two factors.

The models' other layers, Mamba-3, and their experts and residuals are not computed here.

Source: modeling_dragon.py and modeling_olala.py of jgcb00/olala; the names are those of its converter.
"""

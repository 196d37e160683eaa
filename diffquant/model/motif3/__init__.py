"""Motif-3: grouped DIFF V2 over latent keys and values, experts, and four residual streams.

Source: MotifTechnologies' vLLM port (models/motif.py, motif_mtp.py) and the names and shapes of the published index.
"""

"""The trainer of small models: a Transformer, DIFF V1 and DIFF V2 of equal size, alike in all else."""

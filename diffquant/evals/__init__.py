"""Evaluation of language models: what is asked of a model, how the answers are scored and how sure a score is."""

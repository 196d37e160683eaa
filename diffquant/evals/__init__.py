"""Evaluation of language models: tasks, the scoring of answers, and the statistics of scores."""

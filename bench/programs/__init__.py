"""Whole programs beside their peers: generating, quantizing, scoring."""

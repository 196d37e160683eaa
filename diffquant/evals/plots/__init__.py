"""Plots that tasks add to a sweep. No torch here."""

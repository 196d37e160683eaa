"""What attention and hidden states of a model look like: outliers, and where attention goes."""

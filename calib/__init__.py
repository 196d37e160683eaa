"""What to know of a model before it is quantized: outliers, static scales, sensitivity, a search for bits."""

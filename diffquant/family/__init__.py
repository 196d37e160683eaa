"""What differential attention is: its specification, masks and per-pair norm. Needs torch alone."""

"""An opened checkpoint: what it holds, which one it is, its tokenizer and its calibrated ranges."""

"""Measurements that need a GPU: ratios of kernels against their aims, and tuning of the kernels' configurations."""

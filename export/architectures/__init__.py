"""Export of each architecture: the nodes that its blocks add to a graph, and the torch reference for `verify`."""

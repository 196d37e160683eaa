"""The command line. Every body imports what it needs when it is called, so `--help` stays instant."""

from diffquant.cli import benches, calibrate, checkpoints, measure, onnx, reports, serve, setup
from diffquant.cli.app import app, main

__all__ = ["app", "benches", "calibrate", "checkpoints", "main", "measure", "onnx", "reports", "serve", "setup"]

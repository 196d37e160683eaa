"""Attention backends, one file each; importing this package registers them all."""

import sys

from diffquant.support.names import import_all

import_all(sys.modules[__name__])

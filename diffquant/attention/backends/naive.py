"""The reference implementation as a backend: any device, any logits, full maps in memory."""

from diffquant.attention.naive import naive
from diffquant.attention.registry import Backend, register

register(Backend("naive", naive, logits="both"))

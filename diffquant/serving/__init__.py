"""Lets other engines run the folders that diffquant writes, without diffquant."""

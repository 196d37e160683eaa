"""The check of pages: what each says, declared beside it and compared with the raw files."""

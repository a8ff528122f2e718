"""The jobs of encode, classify and prepare, which resume after a stop, and of fill-mask."""

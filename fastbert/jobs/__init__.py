"""The jobs of four commands: encode, classify and prepare, which can resume, and fill-mask."""

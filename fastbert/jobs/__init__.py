"""The jobs of the commands: encode and classify, which resume after a stop, and fill-mask."""

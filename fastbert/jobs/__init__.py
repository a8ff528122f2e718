"""The jobs of the commands encode, classify, prepare and fill-mask; fill-mask cannot resume."""

"""The jobs of the commands encode, classify, prepare and fill-mask; all but the last can resume."""

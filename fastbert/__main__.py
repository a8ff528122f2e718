"""``python -m fastbert``: the same command line as the ``fastbert`` script."""

from fastbert.cli import main

if __name__ == "__main__":
    main()

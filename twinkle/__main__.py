"""``python -m twinkle`` is the command ``twinkle``."""

import sys

from twinkle_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

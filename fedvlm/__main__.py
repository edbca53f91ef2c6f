"""`python -m fedvlm`."""

import sys

from fedvlm.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m trl_populora.sandbox`."""

import sys

from .check import main


sys.exit(main(sys.argv[1:]))

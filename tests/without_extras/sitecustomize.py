"""Hides packages from the Python that has this folder on its path."""

import os
import sys


sys.modules.update(dict.fromkeys(os.environ.get("POPULORA_TESTS_WITHOUT", "").split()))

"""Hides packages from the Python that has this folder on its path, and has it look once at those that are there."""

import gc
import os
import sys
from functools import cache
from importlib import metadata


sys.modules.update(dict.fromkeys(os.environ.get("POPULORA_TESTS_WITHOUT", "").split()))
# TRL and transformers ask one after the other, for most of a second each: a vLLM installation has 250 packages.
metadata.packages_distributions = cache(metadata.packages_distributions)
# Importing TRL makes millions of objects that stay: looking at all of them again and again is a quarter of a start.
gc.set_threshold(700, 10, 1000)

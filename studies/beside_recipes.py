"""Lets a study import what lies in `recipes/`, such as the language of the embedded base."""

import sys
from pathlib import Path


sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))

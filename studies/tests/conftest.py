"""The fixtures of `tests/`, and the scripts of `studies/` and `recipes/` to import."""

import sys
from pathlib import Path

from tests.conftest import *  # noqa: F403
from tests.conftest import _environment_is_given_back, _interruptible, _processes_are_forgotten  # noqa: F401


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "studies"), str(ROOT / "recipes")]

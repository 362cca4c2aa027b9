"""Old module names go on for one release, with a warning that names the new ones."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from trl_populora._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_leads_to_the_new_modules(old):
    sys.modules.pop(f"trl_populora.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"`trl_populora.{old}` is `trl_populora.{MOVED[old][0]}`"):
        found = importlib.import_module(f"trl_populora.{old}")
    for home in (importlib.import_module(f"trl_populora.{each}") for each in MOVED[old]):
        own = [name for name, value in vars(home).items() if getattr(value, "__module__", None) == home.__name__]
        assert all(getattr(found, name) is getattr(home, name) for name in own)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = found.nothing


def test_what_scripts_imported_is_found():
    sys.modules.pop("trl_populora.given_tasks", None)
    with pytest.warns(DeprecationWarning, match="`trl_populora.tasks.dataset`, `trl_populora.evaluate.held_out`"):
        from trl_populora.given_tasks import load_held_out, read_tasks
    assert (load_held_out.__name__, read_tasks.__name__) == ("load_held_out", "read_tasks")


def test_a_name_that_never_was_is_not_found():
    assert importlib.util.find_spec("trl_populora.nothing") is None

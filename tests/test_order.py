"""A file of tests leaves nothing behind that another one stumbles over."""

from accelerate import Accelerator
from accelerate.state import PartialState

from tests.conftest import forget_processes


def test_no_file_inherits_the_processes_of_another():
    Accelerator(cpu=True)
    PartialState._shared_state["num_processes"] = 2  # as a file with a colocated engine may leave it
    assert Accelerator(cpu=True).num_processes == 2
    forget_processes()
    assert Accelerator(cpu=True).num_processes == 1

"""A file of tests leaves nothing behind that another one stumbles over."""

from accelerate.state import AcceleratorState, PartialState

from tests.conftest import forget_processes


def test_no_file_inherits_the_processes_of_another():
    AcceleratorState(cpu=True)
    PartialState._shared_state["num_processes"] = 2  # as a colocated engine leaves it
    assert AcceleratorState().num_processes == 2
    forget_processes()
    assert AcceleratorState(cpu=True).num_processes == 1

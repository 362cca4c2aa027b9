"""The script of a zygote. In a child its loop calls the program, and no other frame lies below the program's frames.

`main` deletes the names of this script and serves orders until it is in a child. There `main` yields one call after
another, and is suspended while a call runs. So a program that goes down the frames finds this script alone, with three
names: `function` and `arguments` of the call that runs, and `answer`, which holds the result of the call before.
"""

import os
import sys
import types


# Some modules register work for every forked child. `random`, for one, reseeds its hidden generator with 2.5 KB from
# the kernel, which costs more than most programs. Children need none of it.
os.register_at_fork = lambda **_: None
# Python puts the folder of this script first on the path. The script takes the folder off and makes it a package named
# `sandbox_room`. So the relative imports in the folder work, and nothing imports `trl_populora`.
package = types.ModuleType("sandbox_room")
package.__path__ = [sys.path.pop(0)]
sys.modules["sandbox_room"] = package

from sandbox_room.zygote import main  # noqa: E402


answer: list = [False, None]  # whether the call returned, and what it returned or raised
for function, arguments in main(answer, globals()):
    try:
        answer[1] = function(*arguments)
        answer[0] = True
    except BaseException as error:  # noqa: B036 - a program may raise anything, and any of it is its result
        answer[0], answer[1] = False, error

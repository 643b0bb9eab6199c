"""The numbers by which kernels get other random bits than each other.

A number must be the same in every run of a program, in every process and
after a file was loaded. Names that Keras counts are not: a second model in a
process has others. So kernels are counted in the order in which the call of a
model uses them; where a layer is called alone, it is a hash of the kernel's
path.
"""

from __future__ import annotations

import zlib

from keras import ops

from keras_policy_ext._keras import calls
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers.state_variable import StateVariable
from keras_policy_ext.numerics.observations import numbered_row

#: Float32 holds all integers below.
_MOST = 2**24

#: The attribute of the root of a call that has the states used so far.
_USED = "_float8_states_used"


def numbered(state: StateVariable, matrix: Tensor) -> Tensor:
    """A state that counts, with the number of its kernel, for one step.

    Args:
        state: The variable.
        matrix: Its value.
    """
    row = numbered_row(matrix.shape[1], number_of(state))
    return ops.add(matrix, ops.convert_to_tensor([row], "float32"))


def number_of(state: StateVariable) -> int:
    """The number of a kernel in the call that is under way."""
    root = calls.root_of_call()
    if root is None:
        return zlib.crc32(state.kernel.path.encode()) % _MOST
    # A tuple: torch.compile lets no dict change here.
    known: tuple[int, ...] = getattr(root, _USED, ())
    if id(state) not in known:
        known = (*known, id(state))
        setattr(root, _USED, known)
    return known.index(id(state))

"""Make Keras accept the names of float8 policies."""

import keras

from keras_policy_ext import policy_names
from keras_policy_ext._keras import names
from keras_policy_ext.policies.float8 import get

_are_read = True


def names_in_keras(read: bool) -> None:
    """Set whether Keras accepts names of float8 policies, in all threads.

    Keras accepts them once this package is imported.
    `keras.layers.Dense(8, dtype="mixed_float8")` and
    `keras.config.set_dtype_policy("float8/current_from_float32")` then work as
    with the policy object. `"float8_from_<source>"` still means Keras's own
    float8 there. Under Keras's own float8 policy, layers without float8 then
    compute as its source policy says.

    Args:
        read: False for Keras's behavior without this package; True to accept
            the names again.
    """
    global _are_read
    _are_read = bool(read)


def _read(name: str) -> keras.DTypePolicy | None:
    """Return the policy of a name of this package; None for any other name."""
    if not policy_names.is_ours(name):
        return None
    if _are_read:
        return get(name)
    raise ValueError(
        f"{name!r} is a policy name of keras_policy_ext, and Keras does not "
        "read such names now. Allowed: a policy of Keras, or the policy "
        f"object: dtype=keras_policy_ext.get({name!r}). To let Keras read the "
        "names, call keras_policy_ext.policies.names_in_keras(True)."
    )


names.read_names(_read)
names.call_without_float8(lambda: _are_read)

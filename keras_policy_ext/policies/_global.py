"""Read Keras's global policy without fixing it to the current floatx."""

import threading

import keras

from keras_policy_ext import scopes
from keras_policy_ext._keras import global_policy
from keras_policy_ext.policies import plain

#: The stored policy (None: none) and the floatx that is followed (or None).
State = tuple[keras.DTypePolicy | None, str | None]


class _Following(threading.local):
    """Per thread, the floatx that the global policy follows, or None."""

    floatx: str | None = None


_following = _Following()


def dtype_policy() -> keras.DTypePolicy:
    """Return the global dtype policy of this thread.

    Without a policy that was set it is that of the current floatx, and follows
    it. Keras's own function stores that policy when it is read. After
    `set_dtype_policy(None)` this function discards such a stored policy if the
    floatx has changed.

    Examples:
        >>> with kpe.policy_scope("mixed_bfloat16"):
        ...     kpe.dtype_policy().name
        'mixed_bfloat16'
    """
    stored, floatx = global_policy.stored_global_policy(), _following.floatx
    if floatx is not None and _is_outdated(stored, floatx):
        restore((None, keras.config.floatx()))
        stored = None
    if stored is None:
        return keras.DTypePolicy(keras.config.floatx())
    return stored


def snapshot() -> State:
    """Return this thread's global policy and floatx, for `restore`."""
    return global_policy.stored_global_policy(), _following.floatx


def restore(state: State) -> None:
    """Set this thread's global policy and floatx to those of a `snapshot`."""
    policy, _following.floatx = state
    global_policy.store_global_policy(policy)


SCOPES = scopes.Scopes("policy_scope", snapshot, restore)


def _is_outdated(stored: keras.DTypePolicy | None, floatx: str) -> bool:
    """Return True if a policy, or none, is of a floatx that changed."""
    if keras.config.floatx() == floatx:
        return False
    # Keras has stored the policy of that floatx, or nothing yet.
    return stored is None or (plain.is_plain(stored) and stored.name == floatx)

"""The places where code from outside can follow, or replace, what layers do.

`register_follower` registers who keeps what belongs to a model in step when
`convert` or `revert` changes the model.

These names are stable: extensions of this package use no others to follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import keras

__all__ = ["Follower", "ModelChange", "followers", "register_follower"]

# Changes of whole models


class ModelChange(NamedTuple):
    """A change of a model by `convert` or `revert`.

    Attributes:
        model: The model, or a layer.
        to_float8: True for `convert`, False for `revert`.
        find_optimizers: It returns the optimizers of the model and of models in
            it, without those that they wrap.
        optimizer_option: The argument `optimizer` of `convert`, or None.
    """

    model: keras.Layer
    to_float8: bool
    find_optimizers: Callable[[], list[keras.optimizers.Optimizer]]
    optimizer_option: Any = None


class Follower:
    """The base class of those that follow changes of models; it does nothing.

    A change is all or nothing: if anything raises in it, `after` included, the
    layers and optimizers of the model are restored. So `after` may change
    these, and has nothing to undo.

    Attributes:
        takes_optimizer_option: Whether it acts on the argument `optimizer` of
            `convert`.
    """

    takes_optimizer_option: ClassVar[bool] = False

    def before(self, change: ModelChange) -> Any:
        """Return what `after` needs to know of the model before the change.

        Raises:
            Exception: If it could not follow the change. Nothing has changed,
                and nothing will.
        """
        return None

    def after(self, change: ModelChange, known: Any) -> None:
        """Bring what belongs to the model in step with its new layers.

        Args:
            change: The change, as for `before`.
            known: What `before` returned.

        Raises:
            Exception: To undo the whole change.
        """

    def may_wrap_optimizer(self, model: keras.Model) -> bool:
        """Return True if `compile` may have wrapped the optimizer of a model.

        A file of the model then may have the wrapper or lack it.
        """
        return False


_F = TypeVar("_F", bound=Follower)
_followers: list[Follower] = []


def register_follower(follower: _F) -> _F:
    """Have a follower asked about every later change of a model.

    Followers are asked in the order in which they are registered.

    ```python
    class Printing(seams.Follower):
        def after(self, change, known):
            print(change.model.name, change.to_float8)

    seams.register_follower(Printing())
    ```

    Returns:
        The follower.
    """
    _followers.append(follower)
    return follower


def followers() -> tuple[Follower, ...]:
    """Return the registered followers."""
    return tuple(_followers)

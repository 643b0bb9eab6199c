"""The base of policies that extend a plain policy and that Keras can save."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import keras

from keras_policy_ext._keras import first_use, global_policy


class SourceMap(keras.dtype_policies.DTypePolicyMap):
    """The base class of policies that extend a plain policy; immutable.

    Many layers share one object. Keras's `from_config` of layers reduces a
    policy to its name unless the policy is a map. A stock layer looks up its
    path in this map and gets its default, the plain source policy.
    """

    read: ClassVar[Callable[[Any], keras.DTypePolicy]]
    """`policies.get`, assigned there, since it knows the subclasses."""

    def __init__(self, source: keras.DTypePolicy) -> None:
        """Make a map without entries, of which `source` is the default."""
        first_use.begin()
        super().__init__(default_policy=source)
        self._source_policy = source
        self._source_name = source.name
        global_policy.name_for_maps(self, source.name)

    @property
    def name(self) -> str:
        """The name of the plain policy, which Keras parses."""
        return self._source_name

    @property
    def source_name(self) -> str:
        """The name of the plain policy that this policy extends."""
        return self._source_name

    @property
    def source_policy(self) -> keras.DTypePolicy:
        """The plain policy that this policy extends."""
        return self._source_policy

    def __getitem__(self, key: str) -> keras.DTypePolicy:
        # For any path: stock layers compute as the source policy says.
        return self._source_policy

    def __setitem__(self, key: str, policy: object) -> None:
        raise TypeError(self._immutable(key))

    def __delitem__(self, key: str) -> None:
        raise TypeError(self._immutable(key))

    def __contains__(self, key: object) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __bool__(self) -> bool:
        return True  # Otherwise a policy without entries is an empty map.

    def __eq__(self, other: object) -> bool:
        """Return True for a policy of the same class and fields."""
        if not isinstance(other, SourceMap):
            return NotImplemented
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), self.get_config())

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        custom_objects: Mapping[str, object] | None = None,
    ) -> Self:
        """Build the policy from the dict of its `get_config()`."""
        # Keras passes `custom_objects`; a policy has no objects in its config.
        return cls(**config)

    def _key(self) -> tuple[object, ...]:
        """Return the fields that `==` and `hash` compare."""
        return (self._source_name,)

    def _immutable(self, key: object) -> str:
        """Return the message for a write to the policy."""
        return (
            f"A {type(self).__name__} is immutable: many layers share it. "
            f"Received: a write to {key!r}. Allowed: reading it. "
            f"{self._instead_of_writing(key)}To change one layer that is "
            "built, call `keras_policy_ext.policies.set_layer_policy(layer, "
            "policy)`; do so before `layer.quantize`. If `quantize` failed "
            "here, the weights are quantized and only the policy is not set: "
            "call it now, with a policy such as 'int8_from_float32'."
        )

    def _instead_of_writing(self, key: object) -> str:
        """Return a sentence for the error, if there is another way."""
        return ""


def is_stock_map(policy: object) -> bool:
    """Return True if a policy is one of Keras's `DTypePolicyMap`s."""
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    return is_map and not isinstance(policy, SourceMap)


def _unpickle(cls: type[SourceMap], config: dict[str, Any]) -> SourceMap:
    return cls.from_config(config)

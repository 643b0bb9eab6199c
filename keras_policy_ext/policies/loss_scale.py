"""`LossScaleDTypePolicy`: a policy that says how the loss is scaled."""

from typing import Any

import keras

from keras_policy_ext import _user_code, policy_names
from keras_policy_ext.policies import _global, _plain, loss_scales
from keras_policy_ext.policies._source_map import SourceMap
from keras_policy_ext.policies.loss_scales import DynamicLossScale, LossScale

AUTO = "auto"


@keras.saving.register_keras_serializable(package="keras_policy_ext")
class LossScaleDTypePolicy(SourceMap):
    """A plain dtype policy, and how the loss of a model is to be scaled.

    Layers compute as under the plain policy. The loss scale is for what
    compiles a model: `mixed_precision.wrap_optimizer`, `compile` and
    `LossScaleMixin`. Usable wherever Keras takes a policy, and saved with
    it. Keras's own `Model.compile` knows no loss scale: it wraps the
    optimizer dynamically if the model's policy name is `"mixed_float16"`.

    Args:
        name: A plain floating policy or its name, such as
            `"mixed_float16"`; None for the global policy. A
            `LossScaleDTypePolicy`, given or global, hands on its loss scale
            too, unless another one is given.
        loss_scale: `"auto"` (dynamic if and only if the name is
            `"mixed_float16"`), `"dynamic"`, None (no scaling), a number
            >= 1, a `FixedLossScale` or a `DynamicLossScale`.

    Raises:
        TypeError: If the loss scale has the wrong type.
        ValueError: If it has a wrong value, or the policy is not a plain
            floating one.

    Examples:
        >>> policy = kpe.LossScaleDTypePolicy("mixed_float16", loss_scale=128)
        >>> policy.compute_dtype, policy.loss_scale
        ('float16', FixedLossScale(loss_scale_value=128.0))
    """

    def __init__(self, name: object = None, loss_scale: object = AUTO) -> None:
        given = _read_policy(name)
        if isinstance(given, LossScaleDTypePolicy):
            inherited = given.requested_loss_scale
            given = given.source_policy
        else:
            inherited = AUTO
        # Keras renames policies that it finds in a map: keep an own object.
        super().__init__(keras.DTypePolicy(given.name))
        if isinstance(loss_scale, str) and loss_scale == AUTO:
            self._requested = inherited
        else:
            self._requested = loss_scales.get(loss_scale)
        if self.loss_scale is not None and self.compute_dtype != "float16":
            _user_code.warn(
                "A loss scale keeps small float16 gradients from becoming 0; "
                f"this policy computes in {self.compute_dtype}. Received: "
                f"{self!r}. Allowed, and of use: 'mixed_float16' and "
                "'float16'. Leave the loss scale out."
            )

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale; `"auto"` is resolved."""
        if self._requested != AUTO:
            return self._requested
        return DynamicLossScale() if self.name == "mixed_float16" else None

    @property
    def requested_loss_scale(self) -> Any:
        """The loss scale as it was given: `"auto"`, None or a loss scale."""
        return self._requested

    @property
    def quantization_mode(self) -> None:
        """Always None: the policy is no quantized one."""
        return None

    def get_config(self) -> dict[str, Any]:
        """All fields, as JSON types; the fields of tf_keras's `Policy`."""
        requested = self._requested
        if requested != AUTO:
            requested = loss_scales.serialize(requested)
        return {"name": self._source_name, "loss_scale": requested}

    def __repr__(self) -> str:
        if self._requested == AUTO:
            return f"LossScaleDTypePolicy({self._source_name!r})"
        scale = getattr(self._requested, "loss_scale_value", self._requested)
        if scale == DynamicLossScale():
            scale = "dynamic"
        return (
            f"LossScaleDTypePolicy({self._source_name!r}, loss_scale={scale!r})"
        )

    def _key(self) -> tuple[object, ...]:
        return self._source_name, self._requested


def _read_policy(identifier: object) -> keras.DTypePolicy:
    if identifier is None:
        policy = _global.dtype_policy()
    elif isinstance(identifier, str) and policy_names.is_full_name(identifier):
        raise ValueError(_not_plain(identifier))
    else:
        try:
            policy = keras.dtype_policies.get(identifier)
        except (TypeError, ValueError) as error:
            raise ValueError(_not_plain(identifier, error)) from error
    if not isinstance(policy, LossScaleDTypePolicy):
        if not _plain.is_plain(policy):
            raise ValueError(_not_plain(policy))
        _plain.floating(policy, "A LossScaleDTypePolicy")
    return policy


def _not_plain(received: object, cause: Exception | None = None) -> str:
    suffix = "" if cause is None else f" Cause: {cause}"
    return (
        "A LossScaleDTypePolicy stands on a plain floating policy. Received: "
        f"{received!r}. Allowed: 'mixed_float16', 'mixed_bfloat16', "
        f"{_plain.FLOAT_NAMES}. For a float8 policy pass the loss scale to "
        "the optimizer: mixed_precision.LossScaleOptimizer(optimizer, "
        f"dynamic=False, initial_scale=...).{suffix}"
    )

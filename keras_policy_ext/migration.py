"""Convert models and configs that tf_keras (Keras 2) wrote to Keras 3.

`migrate_config` rewrites a config; `load_legacy_model` reads a whole file.
Nothing here needs TensorFlow or tf_keras, and no code in a file is executed
unless you allow it.
"""

from keras_policy_ext.ext.migration.configs import migrate_config
from keras_policy_ext.ext.migration.loading import load_legacy_model

__all__ = ["load_legacy_model", "migrate_config"]

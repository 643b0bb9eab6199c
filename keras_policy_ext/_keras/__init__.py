"""Access to Keras internals, where the public API is not enough.

Each file has one subject. Each function says what it is for, with which Keras
versions it works, and when it can be removed. Internals are feature-detected:
if they are missing, the public API is used as far as possible. For each use, a
test in `tests/core/keras_contacts` shows the behaviour of Keras that makes it
necessary, and fails when Keras changes it.
"""

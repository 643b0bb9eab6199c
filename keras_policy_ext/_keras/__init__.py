"""Access to Keras internals, where the public API is not enough.

Each file has one subject. Each function says what it is for, which private
name it uses, and with which Keras versions it works. If the name is missing,
the public API is used as far as possible, or the function raises the
ImportError of `versions.missing`. Unless it says otherwise, it expires when
Keras has a public way to do the same. For each use, a test in
`tests/core/keras_contacts` shows the behaviour of Keras that makes it
necessary, and fails when Keras changes it.
"""

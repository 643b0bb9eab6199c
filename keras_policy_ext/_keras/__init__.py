"""The one room that touches what Keras's public API does not offer.

One file a subject. Each function says what it is for, which Keras versions it
was seen to work on, and when it can go. Internals are feature-detected: where
they are gone, the public API does as much as it can. `tests/keras_contacts`
shows for each what stock Keras does that makes it necessary, and fails when
Keras no longer does so.
"""

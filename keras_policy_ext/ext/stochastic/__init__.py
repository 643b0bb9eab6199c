"""Rounds at random, and counts the steps that random keys are made of.

`rounding` rounds to neighbours of a value, by random bits. `counting` is the
state of a kernel whose recipe rounds at random; it is imported for the first
recipe that remembers something.
"""

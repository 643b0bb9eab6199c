"""Keeps what recipes remember of a kernel: amaxes of steps, or their count.

`sources` and `counting` find scales and random keys by a state, `variable` is
the state of a kernel, and `states` those of a layer. It is imported for the
first recipe that remembers something, and replaces functions of Keras for the
first state that is made.
"""

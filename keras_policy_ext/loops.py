"""Training loops with optimizers other than Keras's.

The gradients of the float8 state carry observations. Optimizers of Keras
assign them to the state, and a step of `torch.optim` triggers the same. Such
loops do not need this module. Any other optimizer must not update the state,
and the loop passes the observations on:

```python
optimizer = SomeOptimizer(kpe.loops.parameters(model))
for x, y in batches:
    optimizer.zero_grad()
    loss_of(model(x, training=True), y).backward()
    optimizer.step()
    kpe.loops.settle(model)
```
"""

from keras_policy_ext.ext.loops.loops import (
    cuda_graphs,
    follow_shards,
    gather_float8,
    is_state,
    parameters,
    settle,
    settled,
    uncut,
    weights,
)

__all__ = [
    "cuda_graphs",
    "follow_shards",
    "gather_float8",
    "is_state",
    "parameters",
    "settle",
    "settled",
    "uncut",
    "weights",
]

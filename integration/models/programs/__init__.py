"""Programs as people write them with stock Keras, each made small.

Each module has

- `make()`: the model, built, and compiled where it is trained by `fit`;
- `train(model)`: two epochs or so; the loss of each;
- `predict(model)`: what the model is for, as an array;

and, where it is not as usual,

- `BACKENDS`: those that the program is meant for;
- `KERAS_FAILS`: for a backend, the error with which stock Keras ends training;
- `KERAS_LOADS`: False where stock Keras cannot make the model from a file;
- `KERAS_COMPILES`: False where it then has no optimizer.
"""

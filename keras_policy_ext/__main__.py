"""`python -m keras_policy_ext` is the command `keras-policy-ext`."""

from keras_policy_ext.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Run the command `keras-policy-ext` by `python -m keras_policy_ext`."""

from keras_policy_ext_cli import main

if __name__ == "__main__":
    raise SystemExit(main())

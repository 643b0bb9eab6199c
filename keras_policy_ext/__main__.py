"""`python -m keras_policy_ext` is the command `keras-policy-ext`.

Python has imported the package when this module runs, and so Keras, on the
backend of the environment. The command may choose another one: it runs in a
process of its own.
"""

import subprocess
import sys

if __name__ == "__main__":
    command = [sys.executable, "-m", "keras_policy_ext_cli", *sys.argv[1:]]
    try:
        status = subprocess.call(command)
    except KeyboardInterrupt:  # The other process says so.
        status = 130
    raise SystemExit(status)

"""Run the command `keras-policy-ext` by `python -m keras_policy_ext`.

When this module runs, Python has already imported the package and Keras, on
the backend of the environment. The command may choose another backend, so it
runs in a separate process.
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

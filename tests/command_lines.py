"""How a command that is refused ends."""

import pytest

from keras_policy_ext.ext.cli import commands as cli


def error_of(capsys, *arguments):
    """The one line on stderr of a command that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output = capsys.readouterr()
    (line,) = output.err.splitlines()

    assert ended.value.code == 2
    assert output.out == ""
    return line

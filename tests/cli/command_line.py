"""Commands as tests run them."""

import json
from pathlib import Path

from rockmate.cli import main

MODEL = Path(__file__).parent / "example_model.py"


def run(capsys, *arguments):
    """(exit status, standard output, standard error) of a command."""
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


def run_json(capsys, *arguments):
    """(exit status, the object that a command prints)."""
    status, out, err = run(capsys, *arguments, "--json")
    assert out, err
    content = json.loads(out)
    assert content.pop("command") == " ".join(word for word in arguments[:2] if word in (arguments[0], "list", "show"))
    assert content.pop("version") == 1
    return status, content

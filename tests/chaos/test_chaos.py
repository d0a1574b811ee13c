"""The chaos run in a few seconds; minutes of it are run by hand (`python -m tests.chaos.run`)."""

import json

from tests.chaos import run


def test_everything_at_once_leaves_no_fault(capsys):
    arguments = "--seconds 8 --users 40 --tasks 8 --kill-every 5 --seed 3"
    assert run.main(arguments.split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["answers_checked"] > 0 and result["cores_killed"] == 1

"""How many connections fit, with limits of a process of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 500))
from engine.entrypoints.open_files import fit_connections
print(fit_connections(int(sys.argv[1])), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("wanted", "fitting"), [(100, 100), (372, 372), (373, 372), (9000, 372)])
def test_the_limit_of_open_files_is_raised_and_kept_to(wanted, fitting):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(wanted)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(fitting), "500", "500"]
    assert ("max_connections is" in done.stderr) == (wanted > fitting)

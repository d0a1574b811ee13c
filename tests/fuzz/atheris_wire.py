"""Coverage-guided fuzzing of the wire's decoders with atheris.

    PYTHONPATH=.:tests/support python -m tests.fuzz.atheris_wire {http,grpc} -runs=100000

What stands after the first word goes to libFuzzer. A crash is written to a file; run with that
file's name to replay it. atheris is no dependency of the project: pip install atheris.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["engine.entrypoints", "engine.request_builder"]):
    from tests.fuzz.wire_cases import check_grpc, check_http

CHECKS = {"http": check_http, "grpc": check_grpc}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in CHECKS:
        sys.exit(f"say which decoder to fuzz: {' or '.join(CHECKS)}")
    check = CHECKS[sys.argv[1]]

    def one_input(tape: bytes) -> None:
        check(tape)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

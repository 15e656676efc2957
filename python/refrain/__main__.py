# SPDX-License-Identifier: Apache-2.0
"""The program of the wheel: `refrain ...` and `python -m refrain ...`."""
import os
import pathlib
import sys


def main() -> None:
    program = pathlib.Path(__file__).parent / "bin" / "refrain"
    if not program.is_file():
        sys.exit(f"{program} does not exist: install the wheel")
    os.execv(program, ["refrain", *sys.argv[1:]])


if __name__ == "__main__":
    main()

"""One of the Python targets under atheris: `python under_atheris.py fuzz_header [OPTIONS]`."""

# ruff: noqa: T201
from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from random import Random

import atheris

PARSERS = ["kda_stream.checkpoint", "kda_stream.jsontext", "kda_stream.foreign"]
REPORTED_EVERY = 1_000_000


def main() -> None:
    name = sys.argv.pop(1)
    sys.argv[0] = f"{sys.executable} {__file__} {name}"  # by which libFuzzer calls itself to merge
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with atheris.instrument_imports(include=PARSERS):
        target = importlib.import_module(f"fuzz.{name}")
    answers: Counter[str] = Counter()

    def check(data: bytes) -> None:
        answers["refused" if target.check(data) is None else "accepted"] += 1
        if answers.total() % REPORTED_EVERY == 0:
            print(f"#{answers.total()}", *answers.items(), file=sys.stderr)

    def mutate(data: bytes, bytes_max: int, seed: int) -> bytes:
        def change(part: bytes) -> bytes:
            return atheris.Mutate(part, bytes_max)

        return target.mutate(data, bytes_max, Random(seed), change)[:bytes_max]

    atheris.Setup(sys.argv, check, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""A minute (half an hour in the slow one; NANOPD_SOAK_SECONDS for any other time) of random load and random faults: no
wrong token, nobody hangs, no block is lost, no memory grows, and nobody dies who was not killed (rule P8)."""

import asyncio
import importlib
import json
import os
import random
from typing import Any

import pytest

from nanopd import cli

cli.add_checkout_commands()
soaking: Any = importlib.import_module("nanopd_lessons.soak")


def soak(seconds: float) -> None:
    seed = int(os.environ.get("NANOPD_SOAK_SEED", random.randrange(2**32)))
    tally = asyncio.run(soaking.soak(seconds, seed))
    print(json.dumps({"seed": seed, "seconds": seconds} | tally.row()))
    print(json.dumps(tally.faults))
    about = f"seed {seed}: {tally.row()}"
    assert not tally.wrong and not tally.hung and not tally.leaked and not tally.unexpected, about
    assert tally.right > tally.requests / 5 and tally.received > 0, about
    assert sum(tally.faults.values()) >= seconds / 30, about
    assert tally.requests == tally.right + tally.errored + tally.left, about
    assert tally.growth < 30, about


@pytest.mark.timeout(900)
def test_a_minute():
    soak(float(os.environ.get("NANOPD_SOAK_SECONDS", 60)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_half_an_hour():
    soak(float(os.environ.get("NANOPD_SOAK_SECONDS", 1800)))

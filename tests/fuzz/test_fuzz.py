"""Mutated files and requests, the same ones every time; `make fuzz` tries fresh ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import mutate
from tests.fuzz.driver import corpus, fault_of, fuzz
from tests.fuzz.targets import TARGETS, Target

# How many with make test, and how many more with make test-all: 6,100 files and 2,100 requests in all.
FEW, EXPENSIVE = 30, {"checkpoint", "checkpoint-tensors", "status", "settings", "video"}
MANY = {"config": 1500, "tensors": 1000, "state": 800, "manifest": 500, "clip": 500, "explore": 2100}


@pytest.fixture(params=TARGETS, ids=lambda target: target.name, scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made: Target = request.param()
    made.make(Path(tmp_path_factory.mktemp(made.name)))
    yield made
    made.close()


def test_what_once_broke_something(target: Target) -> None:
    for path in corpus(type(target)):
        assert fault_of(target, path.read_bytes()) == "", path.name


def test_mutations_end_in_one_of_our_errors(target: Target) -> None:
    few = FEW // 5 if target.name in EXPENSIVE else FEW
    assert fuzz(target, range(few)) == (few, [])


@pytest.mark.slow
def test_many_mutations_end_in_one_of_our_errors(target: Target) -> None:
    count = MANY.get(target.name, 225)
    assert fuzz(target, range(1000, 1000 + count)) == (count, [])


def test_a_seed_is_the_same_mutation_whatever_was_mutated_before() -> None:
    value = {"a": [1, {"b": "tt:r=2"}, [2, 3]], "c": 1.5}
    first = [mutate.json_values(random.Random(seed), value) for seed in range(3000)]
    again = [json.dumps(mutate.json_values(random.Random(seed), value)) for seed in range(3000)]
    assert [json.dumps(found) for found in first] == again

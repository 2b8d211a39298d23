"""What is prepared of a sparse matrix: read where it was made, ignored elsewhere, and refused if it is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kronecell.ops.kernels import register_width
from kronecell.ops.sparse import sparse_linear, sparse_prepared
from tests.ops.recurrence_cases import Case, draw

WINDOWS = pytest.mark.skipif(register_width() != 16, reason="only the widest registers have something to prepare")
OUTPUTS, INPUTS = 200, 150
HEADER, LANES, BUNDLE = 16, 16, 96


def matrix(outputs: int = OUTPUTS, inputs: int = INPUTS, block: int = 1, share: float = 0.05) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    everywhere = outputs // block * inputs
    places = torch.randperm(everywhere, generator=generator)[: int(share * everywhere)].sort().values
    return torch.randn(len(places), block, generator=generator), places


def product(prepared: Tensor | None, rows: int = 1) -> Tensor:
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1))
    result: Tensor = sparse_linear(x, *matrix(), OUTPUTS, None, prepared)
    return result


def made() -> Tensor:
    result: Tensor = sparse_prepared(*matrix(), OUTPUTS, INPUTS)
    return result


@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("shape", [(48, 7), (960, 512), (480, 1)])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 1.0])
def test_its_size_follows_from_shapes_alone(block: int, shape: tuple[int, int], share: float) -> None:
    values, places = matrix(*shape, block, share)
    torch.library.opcheck(sparse_prepared.kernel, (values, places, *shape))
    prepared = sparse_prepared(values, places, *shape)
    assert prepared.dtype == torch.int32
    assert bool(len(prepared)) == (register_width() == 16 and block != 16 and len(values) > 0)
    meta = torch.empty_like(values, device="meta"), torch.empty_like(places, device="meta")
    assert sparse_prepared(*meta, *shape).shape == (0,)
    assert sparse_prepared(values.double(), places, *shape).shape == (0,)


@WINDOWS
def test_it_is_the_same_every_time() -> None:
    assert torch.equal(made(), made())


@pytest.mark.parametrize("rows", [1, 20])
def test_what_another_width_has_prepared_is_ignored(rows: int) -> None:
    other = made() if register_width() == 16 else torch.tensor([0x7370636B, 1, 16] + [0] * 99, dtype=torch.int32)
    other[2] = 32
    for prepared in (other, torch.empty(0, dtype=torch.int32)):
        assert torch.equal(product(prepared, rows), product(None, rows))


def begin_of(section: str, prepared: Tensor) -> int:
    """Where the first word of a part is; every part but the masks begins a line of 16 words."""
    bundles, turns = -(-OUTPUTS // BUNDLE), -(-(INPUTS - 32) // int(prepared[7])) + 1
    masks = HEADER + bundles * turns * LANES
    left = -(-(masks + bundles * turns * 4) // 16) * 16
    ends = -(-(left + bundles) // 16) * 16
    return {"masks": masks, "left": left, "ends": ends, "at": -(-(ends + bundles * BUNDLE) // 16) * 16}[section]


def put(section: str, number: int, offset: int = 0) -> Callable[[Tensor], Tensor]:
    def change(prepared: Tensor) -> Tensor:
        prepared[begin_of(section, prepared) + offset] = number
        return prepared

    return change


def put_header(place: int, number: int) -> Callable[[Tensor], Tensor]:
    def change(prepared: Tensor) -> Tensor:
        prepared[place] = number
        return prepared

    return change


DAMAGED: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("floats", lambda p: p.float(), "sparse_prepared"),
    ("int64", lambda p: p.long(), "sparse_prepared"),
    ("cut short", lambda p: p[:-1], "of another one"),
    ("too long", lambda p: torch.cat([p, p[:16]]), "of another one"),
    ("a header alone", lambda p: p[:16], "of another one"),
    ("half a header", lambda p: p[:7], "sparse_prepared"),
    ("other magic", put_header(0, 7), "sparse_prepared"),
    ("another version", put_header(1, 2), "this version"),
    ("other outputs", put_header(3, 8), "of another one"),
    ("another stride", put_header(7, 1), "of another one"),
    ("of another matrix", lambda _: sparse_prepared(*matrix(OUTPUTS, INPUTS + 1), OUTPUTS, INPUTS + 1), "another one"),
    ("every mask full", put("masks", -1), "damaged"),
    ("a mask less", put("masks", 0), "damaged"),
    ("a mask without a group", put("masks", 1, 3), "damaged"),
    ("negative leftovers", put("left", -1), "damaged"),
    ("too many leftovers", put("left", 2**31 - 1), "damaged"),
    ("an end that is negative", put("ends", -5), "damaged"),
    ("ends that do not ascend", put("ends", 10**6, 3), "damaged"),
    ("an entry beyond the inputs", put("at", -1), "damaged"),
    ("an entry beyond the bundle", put("at", 127), "damaged"),
]


@WINDOWS
@pytest.mark.parametrize(("what", "change", "words"), DAMAGED, ids=[row[0] for row in DAMAGED])
def test_what_is_damaged_is_refused(what: str, change: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        product(change(made()), rows=20)
    inputs = draw(Case("lstm", "prepared split", batch=20, hidden=50)).to(torch.float32, grad=False)
    wrong = change(made())
    with pytest.raises(RuntimeError, match="prepared"):
        replace(inputs, hidden=[*inputs.hidden[:4], wrong]).run()


@WINDOWS
def test_any_numbers_are_an_error_or_another_product() -> None:
    """None of them leads out of memory; run under a sanitizer this is a proof."""
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(400):
        prepared = made()
        place = int(torch.randint(0, len(prepared), (), generator=generator))
        prepared[place] = int(torch.randint(-(2**31), 2**31, (), generator=generator))
        for rows in (1, 20):
            try:
                product(prepared, rows)
            except RuntimeError:
                refused += 1
    assert refused > 50

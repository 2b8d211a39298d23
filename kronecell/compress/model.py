"""A trained model made smaller: kc.compress(model, rules) -> (model, report). The model that is given stays as it is.

A rule maps a pattern of names to a recipe. A pattern is matched against names of modules (of an LSTM or GRU it then
means the input matrices W of all layers, as `input_format` does) and against names of matrices, such as
rnn.weight_hh_l0, which stands for both directions. Recipes: "tt:r=8" (modes are chosen), "tt:m=8x8,n=4x4,r=3", a
Format, or with a budget, a size or an error just kinds, "tt" or "tt|kcp", whose ranks are then chosen per matrix;
"dense" leaves a matrix to its bits. "lowrank:r=24 shared" lets the gates share what they have in common, and "4 bits"
behind a recipe makes its weights integers.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kronecell.compress.candidates import Candidate, num_indices, num_params, with_integers
from kronecell.compress.finetune import finetune
from kronecell.compress.inputs import record
from kronecell.compress.matrices import Matrix, check_untied, dense, matrices_of, tied
from kronecell.compress.ranks import SMALL, Free, distribute, smallest_within, with_candidates
from kronecell.compress.replace import Choice, replace
from kronecell.compress.report import Plan, Report, measure
from kronecell.compress.sensitivity import sensitivities, trained_answers
from kronecell.compress.suggest import DOPED
from kronecell.errors import KronecellError, ShapeError
from kronecell.formats import FORMATS, Format, Recipe
from kronecell.formats.recipes import layer_formats
from kronecell.nn.quantize import bytes_of, is_quantized, quantize

Rule = Format | Recipe | str
# One start and a coarse tolerance: fine-tuning, which nearly always follows, recovers the last thousandth.
FIT: dict[str, Any] = {"starts": 0, "sweeps": 40, "tolerance": 1e-4}
KINDS = ("lowrank", "tt", "kcp")  # what is tried for a budget or an error without a rule
CLOSED = ("lowrank",)  # and for a size, where bits are tried with each
BITS = (8, 6, 5, 4, 3)
TRIES = 6  # of meeting a size in bytes: what integers need is only known when they are made


def compress(
    model: nn.Module,
    rules: Mapping[str, Rule] | None = None,
    *,
    budget: int | float | None = None,
    error: float | None = None,
    size: int | float | None = None,
    bits: int | Sequence[int] | None = None,
    calibration: Any = None,
    train: Iterable[Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    valid: Iterable[Any] | None = None,
    stages: int = 1,
    training: Mapping[str, Any] | None = None,
    seed: int = 0,
    rows: int = 32,
    progress: Callable[[str], None] | None = None,
    **fit_options: Any,
) -> tuple[nn.Module, Report]:
    """A compressed copy of the model and the report of what was lost where.

    budget       parameters of the matched matrices together (an int), or their part of the number now (a float < 1)
    size         bytes of the whole model (an int), or their part of the bytes now: formats and integers together
    error        |W - W'| / |W| that no matched matrix may exceed (on calibration inputs if there are any)
    bits         3 to 8: weights become integers (see kc.quantize), and the result refuses to train; with a size, those
                 to choose from, () for floats alone
    calibration  a batch or an iterable of batches for model(batch), or {module name: its inputs}
    train        batches for finetune(...), with `loss` and `valid` as there; `training` are its other options, and the
                 teacher if that is another than the model
    stages       with train: the ratio is reached in so many steps of compressing and training
    rows         rows of x for which latency is measured
    fit_options  go to `Format.from_dense`: sweeps, tolerance, starts, max_memory

    Without rules every LSTM and GRU (W and U), their cells, every Linear and every Embedding is matched, and a budget,
    size or error is needed. What is compressed already stays as it is unless a rule names it.

    >>> model, report = compress(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), {"0": "tt:r=2"})
    >>> report.layers[0].params_after < report.layers[0].params_before
    True
    """
    wanted = Wanted(rules, budget, error, size, bits, trained=train is not None)
    options = {**FIT, **fit_options, "seed": seed, "progress": progress}
    if isinstance(calibration, Iterator):
        calibration = [*calibration]  # it is run twice
    if train is None:
        small, plan = _compressed(model, wanted, calibration, seed, progress, options)
        return small, measure(small, plan, rows)
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise KronecellError(f"stages must be a whole number of at least 1, got {stages!r}")
    now, first = model, None
    for stage in range(1, stages + 1):
        now, plan = _compressed(now, wanted.part_of(stage / stages), calibration, seed, progress, options, floats=True)
        first = first or plan
        if progress is not None:
            progress(f"stage {stage} of {stages}: training")
        last = stage == stages
        options_now = {"loss": loss, "valid": valid, "seed": seed, "progress": progress, **(training or {})}
        teacher = options_now.pop("teacher", model)
        if options_now.get("folder") is not None and stages > 1:  # each stage trains other parameters
            options_now["folder"] = Path(options_now["folder"]) / f"stage-{stage}"
        now, _ = finetune(now, teacher, train, bits=(plan.bits or None) if last else None, **options_now)
        if not last:
            now = dense(now)
    assert first is not None
    return now, measure(now, first, rows)  # beside the model that was given


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for."""

    rules: Mapping[str, Rule] | None
    budget: int | float | None
    error: float | None
    size: int | float | None
    bits: int | Sequence[int] | None
    share: float = 1.0  # of the way from the model as it is
    trained: bool = False  # afterwards

    def __post_init__(self) -> None:
        rules, budget, error, size = self.rules, self.budget, self.error, self.size
        if rules is not None and not isinstance(rules, Mapping):
            raise KronecellError(f"rules must map name patterns to recipes, got {type(rules).__name__}")
        if not rules and budget is None and error is None and size is None:
            raise KronecellError('compress needs rules such as {"rnn": "kcp:K=4,CA=4,CB=2"}, a budget, size or error')
        if sum(target is not None for target in (budget, error, size)) > 1:
            raise KronecellError("give a budget, a size or an error, not both or all")
        for name, unit, value in (("budget", "parameters", budget), ("size", "bytes", size)):
            if value is not None and (
                isinstance(value, bool) or value <= 0 or (isinstance(value, float) and value >= 1)
            ):
                raise KronecellError(f"{name} must be a positive number of {unit} or a part below 1, got {value!r}")
        if error is not None and not 0 < error < 1:
            raise KronecellError(f"error must be between 0 and 1, got {error!r}")
        numbers = [self.bits] if isinstance(self.bits, int) else [*(self.bits or ())]
        if any(isinstance(number, bool) or number not in range(3, 9) for number in numbers):
            raise KronecellError(f"bits must be whole numbers from 3 to 8, got {self.bits!r}")
        if size is None and self.bits is not None and not isinstance(self.bits, int):
            raise KronecellError("several bits to choose from need a size in bytes; give one number, or a size")

    def part_of(self, share: float) -> Wanted:
        """A part of the way; integers only at its end."""
        if share < 1 and (self.budget, self.size, self.error) == (None, None, None):
            raise KronecellError("stages need a budget, a size or an error that can be reached by steps")
        return self if share == 1 else dataclasses.replace(self, share=share, bits=() if self.size else None)

    def amount(self, total: int) -> int:
        """The budget or size as a number, of so many parameters or bytes now."""
        value = self.size if self.budget is None else self.budget
        assert value is not None
        part = value if isinstance(value, float) else value / total
        return int(total * part**self.share)

    @property
    def choices(self) -> tuple[int, ...]:
        """Bits that a size may choose."""
        if self.bits is None:
            return BITS
        return (self.bits,) if isinstance(self.bits, int) else tuple(self.bits)


def _compressed(
    model: nn.Module,
    wanted: Wanted,
    calibration: Any,
    seed: int,
    progress: Callable[[str], None] | None,
    options: dict[str, Any],
    floats: bool = False,
) -> tuple[nn.Module, Plan]:
    """A compressed copy; with `floats` the integers are left for later."""
    if is_quantized(model):
        raise KronecellError("the model holds integers already: compress the model that kc.quantize was called with")
    model = copy.deepcopy(model)
    matched = _match(model, matrices_of(model), wanted)
    check_untied(model, [matrix for matrix, _ in matched])
    inputs: dict[str, Tensor] = {}
    if calibration is not None:
        inputs = record(model, [matrix for matrix, _ in matched], calibration, progress)
    fixed, free = _sorted(matched, wanted)
    plan = Plan(
        [matrix for matrix, _ in matched], inputs, _params(model), bytes_of(model), {},
    )  # fmt: skip
    if wanted.error is not None:
        found = [(f.matrix, smallest_within(f, wanted.error, inputs.get(f.matrix.name), seed, progress)) for f in free]
        bits = {f.matrix.name: f.bits for f in free}
        chosen = [*fixed, *((m, dataclasses.replace(c, bits=bits[m.name])) for m, c in found if c is not None)]
    elif wanted.size is not None:
        return _sized(model, wanted, fixed, free, plan, calibration, seed, progress, options, floats)
    else:
        chosen = fixed
    if wanted.budget is not None and free:
        stored = sum(matrix.stored_params for matrix, _ in matched)
        if wanted.rules is None:
            stored += sum(matrix.stored_params for matrix in matrices_of(model) if matrix.is_compressed)
        kept = stored - sum(matrix.stored_params for matrix, _ in matched)
        spent = sum(candidate.cost("params") for _, candidate in fixed) + kept
        allowed = wanted.amount(stored) - spent
        if allowed <= 0:
            raise KronecellError(
                f"the budget is {wanted.amount(stored):,} parameters, and what is compressed already or has its ranks "
                f"in a rule takes {spent:,}; raise the budget, or name those matrices in rules to fit them again"
            )
        weights = (
            sensitivities(model, plan.matrices, calibration, inputs, seed, progress) if calibration is not None else {}
        )
        free = with_candidates(free, (), inputs, seed, allowed, progress)
        chosen = fixed + distribute(free, allowed, "params", weights)
    changed = [(matrix, candidate) for matrix, candidate in chosen if candidate.format is not None]
    plan.bits.update({"": wanted.bits} if isinstance(wanted.bits, int) else {}, **bits_of(chosen))
    if not changed and not plan.bits:
        raise KronecellError("nothing was compressed: every matched matrix is kept dense by this budget or error")
    small = replace(model, changed, inputs, options)
    return (small if floats or not plan.bits else quantize(small, plan.bits)), plan


def _sized(
    model: nn.Module,
    wanted: Wanted,
    fixed: list[Choice],
    free: list[Free],
    plan: Plan,
    calibration: Any,
    seed: int,
    progress: Callable[[str], None] | None,
    options: dict[str, Any],
    floats: bool,
) -> tuple[nn.Module, Plan]:
    """Formats and bits for a number of bytes, which is met by the model that is made, not by the estimate."""
    target = wanted.amount(plan.bytes_before)
    free = with_candidates(free, wanted.choices, plan.inputs, seed, None, progress)
    for matrix, candidate in fixed:  # a format that a rule gives, as floats or integers
        seen = plan.inputs.get(matrix.name)
        choices = (candidate.bits,) if candidate.bits else wanted.choices
        plain = dataclasses.replace(candidate, bits=0)
        forms = with_integers(matrix, [plain], choices, seen)
        free.append(Free(matrix, (), candidate.bits, tuple(forms[bool(candidate.bits) :])))
    weights = (
        {} if calibration is None else sensitivities(model, plan.matrices, calibration, plan.inputs, seed, progress)
    )
    if wanted.trained:
        weights = trained_answers(weights, plan.inputs)
    allowed = target - plan.bytes_before + sum(entry.matrix.stored_bytes for entry in free)
    if allowed <= 0:
        raise KronecellError(
            f"a size of {target:,} bytes is too small: what no rule matches takes "
            f"{target - allowed:,} bytes; raise it, or match more"
        )
    size = 0
    for attempt in range(TRIES):
        chosen = distribute(free, allowed, "bytes", weights)
        plan.bits.clear()
        plan.bits.update(bits_of(chosen))
        changed = [(matrix, c) for matrix, c in chosen if c.format is not None]
        if progress is not None:
            progress("fitting " + "; ".join(f"{matrix.name}: {c}" for matrix, c in chosen))
        floating = replace(copy.deepcopy(model), changed, plan.inputs, options) if changed else model
        small = quantize(floating, plan.bits) if plan.bits else floating
        size = bytes_of(small)
        if size <= target:
            return (floating if floats else small), plan
        allowed -= int(1.05 * (size - target)) + 16 + attempt * target // 100  # steps of a choice may be large
        if allowed <= 0:
            break
    raise KronecellError(f"no choice reaches {target:,} bytes, the nearest has {size:,}; raise the size")


def bits_of(chosen: Iterable[Choice]) -> dict[str, int]:
    """Names of parameters or modules -> bits, as kc.quantize takes them."""
    found: dict[str, int] = {}
    for matrix, candidate in chosen:
        if candidate.bits:
            names = [""] if matrix.part == "weight" else [f".{name}" for name in matrix.weight_names]
            found |= {(matrix.module + name).removeprefix("."): candidate.bits for name in names}
    return found


def _params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _sorted(matched: list[tuple[Matrix, Rule | None]], wanted: Wanted) -> tuple[list[Choice], list[Free]]:
    """Matrices whose format a rule gives, and those whose format is to be chosen."""
    fixed: list[Choice] = []
    free: list[Free] = []
    total = sum(matrix.params for matrix, _ in matched)
    for matrix, given in matched:
        rule, shared, bits = _words(given, matrix)
        closed = wanted.size is not None or matrix.is_table
        kinds = (CLOSED if closed else KINDS) if rule is None else _kind_only(rule)
        if kinds:
            # Structure saves nothing worth having in a small matrix that no rule names; its bits may.
            alone = matrix.is_compressed or (
                rule is None and (matrix.params < SMALL * total or not matrix.takes_format)
            )
            if kinds == ("dense",) and bits:
                fixed.append((matrix, Candidate(matrix.stored_params, matrix.stored_bytes, 0.0, bits=bits)))
            else:
                free.append(Free(matrix, () if alone or kinds == ("dense",) else kinds, bits))
            continue
        assert rule is not None
        (fmt,) = layer_formats(rule, [(matrix.M, matrix.N)], matrix.name, pad=matrix.is_table)
        assert fmt is not None
        params, indices = num_params(matrix, fmt, shared), num_indices(matrix, fmt)
        if params >= matrix.params:
            raise KronecellError(
                f"{matrix.name}: {fmt} has {params // matrix.copies:,} parameters, not fewer than the "
                f"dense {matrix.params // matrix.copies:,}; lower its ranks or leave the layer out"
            )
        width = matrix.weights()[0].element_size()
        fixed.append((matrix, Candidate(params, width * params + indices, 0.0, 0.0, fmt, shared, bits, indices)))
    if free and wanted.budget is None and wanted.error is None and wanted.size is None:
        names = ", ".join(entry.matrix.name for entry in free)
        raise KronecellError(f"the rule for {names} has no ranks; give them, or a budget or an error to choose them by")
    return fixed, free


def _words(rule: Rule | None, matrix: Matrix) -> tuple[Rule | None, bool, int]:
    """A rule as reports write it, "lowrank:r=24 shared 4 bits": the recipe, whether gates share, and the bits."""
    if not isinstance(rule, str):
        return rule, False, 0
    recipe, shared, bits = re.fullmatch(r"\s*(.*?)(\s+shared)?(?:\s+(\d+) bits)?\s*", rule).groups()  # type: ignore[union-attr]
    if bits and int(bits) not in range(3, 9):
        raise KronecellError(f"bits must be whole numbers from 3 to 8, got {bits} in rule {rule!r}")
    return recipe, bool(shared) and matrix.gates > 1, int(bits or 0)


def _kind_only(rule: Rule) -> tuple[str, ...]:
    """ "tt" or "tt|doped+kcp" names kinds whose ranks (and densities) are to be chosen."""
    if not isinstance(rule, str) or ":" in rule:
        return ()
    kinds = tuple(kind.strip().lower() for kind in rule.split("|"))
    structures = [kind.removeprefix(DOPED) for kind in kinds]
    unknown = [kind for kind in structures if kind not in FORMATS or (kind == "dense" and rule != "dense")]
    if unknown:
        raise ShapeError(f"unknown format {', '.join(unknown)} in rule {rule!r}; expected some of {', '.join(FORMATS)}")
    return kinds


def _match(model: nn.Module, matrices: list[Matrix], wanted: Wanted) -> list[tuple[Matrix, Rule | None]]:
    """Every matrix that a rule matches, with the last such rule; a rule without a match is an error."""
    rules = wanted.rules
    if rules is None:
        uses = tied(model)
        found = [matrix for matrix in matrices if wanted.size is not None or not matrix.is_compressed]
        found = [matrix for matrix in found if not uses & {id(part) for part in matrix.parts()}]
        if not found:
            raise KronecellError(
                "nothing to compress: every LSTM, GRU and Linear inside is compressed already or tied; a rule that "
                "names a layer fits it again from its dense form"
            )
        return [(matrix, None) for matrix in found]
    hits: dict[str, tuple[Matrix, Rule | None]] = {}
    for pattern, rule in rules.items():
        some = [matrix for matrix in matrices if matrix.matched_by(pattern)]
        if not some:
            _no_match(model, matrices, pattern)
        hits |= {matrix.name: (matrix, rule) for matrix in some}
    return [hits[matrix.name] for matrix in matrices if matrix.name in hits]


def _no_match(model: nn.Module, matrices: list[Matrix], pattern: str) -> None:
    excluded = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
    known = {matrix.module for matrix in matrices} | {matrix.name for matrix in matrices}
    excluded = [name for name in excluded if name not in known]
    if excluded:
        kind = type(model.get_submodule(excluded[0])).__name__
        raise KronecellError(
            f"rule {pattern!r} matches {excluded[0]!r}, a {kind}, which cannot be compressed; "
            f"only torch.nn.LSTM, GRU, their cells, Linear and Embedding (and kronecell's own) can"
        )
    names = sorted(known)
    done = [matrix.name for matrix in matrices if matrix.is_compressed]
    note = "; a pattern leaves alone what is compressed already, its name does not" if done else ""
    raise KronecellError(f"rule {pattern!r} matches nothing; there are {', '.join(filter(None, names))}{note}")

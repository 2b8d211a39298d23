"""A trained model made smaller: kc.compress(model, rules) -> (model, report). The model that is given stays as it is.

A rule maps a pattern of names to a recipe. A pattern is matched against names of modules (of an LSTM or GRU it then
means the input matrices W of all layers, as `input_format` does) and against names of matrices, such as
rnn.weight_hh_l0, which stands for both directions. Recipes: "tt:r=8" (modes are chosen), "tt:m=8x8,n=4x4,r=3", a
Format, or with a budget or an error just kinds, "tt" or "tt|kcp", whose ranks are then chosen per matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.compress.inputs import record
from kronecell.compress.matrices import Matrix, check_untied, dense_modules, matrices_of
from kronecell.compress.ranks import Chosen, distribute
from kronecell.compress.report import Report, measure
from kronecell.errors import KronecellError, ShapeError
from kronecell.formats import FORMATS, Format, Recipe
from kronecell.formats.recipes import layer_formats
from kronecell.nn.linear import TensorLinear
from kronecell.nn.recurrent import Recurrent
from kronecell.nn.rnn import GRU, LSTM

Rule = Format | Recipe | str
# One start and a coarse tolerance: fine-tuning, which nearly always follows, recovers the last thousandth.
FIT: dict[str, Any] = {"starts": 0, "sweeps": 40, "tolerance": 1e-4}
KINDS = ("lowrank", "tt", "kcp")  # what is tried where a budget or an error is given without a rule


def compress(
    model: nn.Module,
    rules: Mapping[str, Rule] | None = None,
    *,
    budget: int | float | None = None,
    error: float | None = None,
    calibration: Any = None,
    seed: int = 0,
    rows: int = 32,
    progress: Callable[[str], None] | None = None,
    **fit_options: Any,
) -> tuple[nn.Module, Report]:
    """A compressed copy of the model and the report of what was lost where.

    budget       parameters of the matched matrices together (an int), or their part of the dense number (a float < 1)
    error        |W - W'| / |W| that no matched matrix may exceed (on calibration inputs if there are any)
    calibration  a batch or an iterable of batches for model(batch), or {module name: its inputs}
    rows         rows of x for which latency is measured
    fit_options  go to `Format.from_dense`: sweeps, tolerance, starts, max_memory

    Without rules every LSTM and GRU (W and U) and every Linear is matched, and a budget or an error is needed.

    >>> model, report = compress(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), {"0": "tt:r=2"})
    >>> report.layers[0].params_after < report.layers[0].params_before
    True
    """
    _check_targets(rules, budget, error)
    model = copy.deepcopy(model)
    # Our own layers inside are compressed from their dense form; those that are compressed already only by name.
    model, originals = dense_modules(model, None if rules is None else [*rules])
    matrices = matrices_of(model)
    if not matrices:
        raise KronecellError(
            "nothing to compress: every LSTM, GRU and Linear inside is compressed already; a rule that names a layer "
            "fits it again from its dense form"
        )
    matched = _match(model, matrices, rules)
    check_untied(model, [matrix for matrix, _ in matched])
    inputs = {} if calibration is None else record(model, [matrix for matrix, _ in matched], calibration)
    options = {**FIT, **fit_options, "seed": seed, "progress": progress}
    formats = _choose(matched, budget, error, inputs, seed, progress)
    chosen = [Chosen(matrix, fmt) for matrix, fmt in formats if fmt is not None]
    if not chosen:
        raise KronecellError("nothing was compressed: every matched matrix is kept dense by this budget or error")
    before = sum(parameter.numel() for parameter in model.parameters())
    dense = {matrix.name: matrix.weights() for matrix, _ in matched}
    small = _replace(model, chosen, inputs, options)
    for name, module in originals.items():
        if name and name not in {choice.matrix.module for choice in chosen}:
            setattr(small.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module)  # stays as it was
    return small, measure(small, [matrix for matrix, _ in matched], dense, inputs, before, rows)


def _choose(
    matched: list[tuple[Matrix, Rule | None]],
    budget: int | float | None,
    error: float | None,
    inputs: Mapping[str, Tensor],
    seed: int,
    progress: Callable[[str], None] | None,
) -> list[tuple[Matrix, Format | None]]:
    """One format per matrix: from its rule, or chosen for the budget or error."""
    fixed: list[tuple[Matrix, Format | None]] = []
    free: list[tuple[Matrix, tuple[str, ...]]] = []
    for matrix, rule in matched:
        kinds = KINDS if rule is None else _kind_only(rule)
        if kinds:
            free.append((matrix, kinds))
            continue
        (fmt,) = layer_formats(rule, [(matrix.M, matrix.N)], matrix.name, pad=False)
        assert fmt is not None
        if matrix.copies * fmt.network(matrix.gates).num_params >= matrix.params:
            raise KronecellError(
                f"{matrix.name}: {fmt} has {fmt.network(matrix.gates).num_params:,} parameters, not fewer than the "
                f"dense {matrix.params // matrix.copies:,}; lower its ranks or leave the layer out"
            )
        fixed.append((matrix, fmt))
    if free and budget is None and error is None:
        names = ", ".join(matrix.name for matrix, _ in free)
        raise KronecellError(f"the rule for {names} has no ranks; give them, or a budget or an error to choose them by")
    if not free:
        return fixed
    if budget is not None:
        total = sum(matrix.params for matrix, _ in matched)
        allowed = budget if isinstance(budget, int) else int(budget * total)
        spent = sum(matrix.copies * fmt.network(matrix.gates).num_params for matrix, fmt in fixed if fmt is not None)
        return fixed + distribute(free, inputs, seed, progress, budget=allowed - spent)
    return fixed + distribute(free, inputs, seed, progress, error=error)


def _kind_only(rule: Rule) -> tuple[str, ...]:
    """ "tt" or "tt|kcp" names kinds whose ranks are to be chosen."""
    if not isinstance(rule, str) or ":" in rule:
        return ()
    kinds = tuple(kind.strip().lower() for kind in rule.split("|"))
    unknown = [kind for kind in kinds if kind not in FORMATS or kind == "dense"]
    if unknown:
        raise ShapeError(f"unknown format {', '.join(unknown)} in rule {rule!r}; expected some of {', '.join(FORMATS)}")
    return kinds


def _match(
    model: nn.Module, matrices: list[Matrix], rules: Mapping[str, Rule] | None
) -> list[tuple[Matrix, Rule | None]]:
    """Every matrix that a rule matches, with the last such rule; a rule without a match is an error."""
    if rules is None:
        return [(matrix, None) for matrix in matrices]
    found: dict[str, tuple[Matrix, Rule | None]] = {}
    for pattern, rule in rules.items():
        hits = [matrix for matrix in matrices if matrix.matched_by(pattern)]
        if not hits:
            excluded = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
            if excluded:
                kind = type(model.get_submodule(excluded[0])).__name__
                raise KronecellError(
                    f"rule {pattern!r} matches {excluded[0]!r}, a {kind}, which cannot be compressed; "
                    f"only torch.nn.LSTM, GRU and Linear (and kronecell's own) can"
                )
            names = sorted({matrix.module for matrix in matrices} | {matrix.name for matrix in matrices})
            raise KronecellError(f"rule {pattern!r} matches nothing; there are {', '.join(filter(None, names))}")
        found |= {matrix.name: (matrix, rule) for matrix in hits}
    return [found[matrix.name] for matrix in matrices if matrix.name in found]


def _replace(
    model: nn.Module, chosen: Iterable[Chosen], inputs: Mapping[str, Tensor], options: dict[str, Any]
) -> nn.Module:
    """Every module with a chosen matrix replaced by ours, fitted."""
    by_module: dict[str, list[Chosen]] = {}
    for choice in chosen:
        by_module.setdefault(choice.matrix.module, []).append(choice)
    for name, choices in by_module.items():
        trained = model.get_submodule(name)
        if isinstance(trained, nn.Linear):
            X = inputs.get(choices[0].matrix.name)
            new: nn.Module = TensorLinear.from_dense(trained, choices[0].format, inputs=X, **options)
        else:
            assert isinstance(trained, (nn.LSTM, nn.GRU))
            new = _recurrent(trained, choices, inputs, options)
        if not name:
            return new
        for other, part in [*model.named_modules(remove_duplicate=False)]:
            if part is trained:  # a module used in two places is replaced in both
                parent, _, leaf = other.rpartition(".")
                setattr(model.get_submodule(parent), leaf, new)
    return model


def _recurrent(
    trained: nn.LSTM | nn.GRU, choices: list[Chosen], inputs: Mapping[str, Tensor], options: dict[str, Any]
) -> Recurrent:
    """Our layer with the chosen formats: dense parameters copied, all other matrices fitted, each on its own inputs."""
    formats: dict[str, list[Format | None]] = {part: [None] * trained.num_layers for part in ("weight_ih", "weight_hh")}
    for choice in choices:
        formats[choice.matrix.part][choice.matrix.layer] = choice.format
    kind: type[Recurrent] = LSTM if isinstance(trained, nn.LSTM) else GRU
    arguments = {
        name: getattr(trained, name)
        for name in ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
    }
    if trained.proj_size:
        arguments["proj_size"] = trained.proj_size
    like = next(trained.parameters())
    new: Any = kind(
        **arguments, device=like.device, dtype=like.dtype,
        input_format=formats["weight_ih"], hidden_format=formats["weight_hh"],
    )  # fmt: skip
    names = {weight: choice.matrix.name for choice in choices for weight in choice.matrix.weight_names}
    with torch.no_grad():
        for name, source in trained.named_parameters():
            target = getattr(new, name)
            if isinstance(target, TensorLinear):
                target.fit(source.detach(), inputs=inputs.get(names[name]), **options)
            else:
                target.copy_(source)
    return new.train(trained.training)


def _check_targets(rules: Mapping[str, Rule] | None, budget: int | float | None, error: float | None) -> None:
    if rules is not None and not isinstance(rules, Mapping):
        raise KronecellError(f"rules must map name patterns to recipes, got {type(rules).__name__}")
    if not rules and budget is None and error is None:
        raise KronecellError('compress needs rules such as {"rnn": "kcp:K=4,CA=4,CB=2"}, a budget or an error')
    if budget is not None and error is not None:
        raise KronecellError("give a budget or an error, not both")
    if budget is not None and (isinstance(budget, bool) or budget <= 0 or (isinstance(budget, float) and budget >= 1)):
        raise KronecellError(f"budget must be a positive number of parameters or a part below 1, got {budget!r}")
    if error is not None and not 0 < error < 1:
        raise KronecellError(f"error must be between 0 and 1, got {error!r}")

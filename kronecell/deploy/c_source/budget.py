"""Bytes that a processor has, and what would fit into them where a network does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from kronecell.deploy.c_source.parts import Classifier, Network
from kronecell.errors import CheckpointError, KronecellError
from kronecell.nn.quantize import quantize
from kronecell.nn.recurrent import Recurrent

BITS = (8, 6, 4, 3)
RANKS = (32, 16, 8, 4, 2, 1)  # of a low-rank format in place of a dense matrix
FEWER = (0.75, 0.5, 0.25, 0.125)  # hidden units


@dataclass(frozen=True)
class Budget:
    """Bytes of flash and of RAM; None has no limit."""

    flash: int | None
    ram: int | None

    @classmethod
    def of(cls, flash: int | None, ram: int | None) -> Budget:
        """Checked."""
        for name, value in (("flash", flash), ("ram", ram)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise CheckpointError(f"{name} must be a positive number of bytes, got {value!r}")
        return cls(flash, ram)

    @property
    def given(self) -> bool:
        """Whether there is a limit."""
        return self.flash is not None or self.ram is not None

    def holds(self, flash: int, ram: int) -> bool:
        """Whether these keep it."""
        return (self.flash is None or flash <= self.flash) and (self.ram is None or ram <= self.ram)

    def refusal(
        self,
        network: Network,
        needed: Sequence[tuple[int, int]],
        needs: Callable[[nn.Module], tuple[int, int]],
    ) -> str:
        """What it would take in the smallest of the orders, and a change that keeps the budget."""
        flash, ram = min(needed, key=lambda pair: self._excess(*pair))
        limits = [f"{kind} of {limit:,}" for kind, limit in (("flash", self.flash), ("RAM", self.ram)) if limit]
        said = f"the network takes {flash:,} bytes of flash and {ram:,} of RAM, the budget is {' and '.join(limits)}"
        for change, module in _smaller(network):
            try:
                small = needs(module())
            except KronecellError:  # a change that this network does not take
                continue
            if self.holds(*small):
                return f"{said}; {change} would fit: {small[0]:,} and {small[1]:,} bytes"
        return f"{said}; no change of bits, ranks or hidden units that was tried fits"

    def _excess(self, flash: int, ram: int) -> float:
        return max(flash / (self.flash or flash), ram / (self.ram or ram))


def _smaller(network: Network) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Changes that make a network smaller, the gentle ones first; a module is made when it is asked for."""
    module = network.module
    rnn = module.classifier_parts().rnn if isinstance(module, Classifier) else module
    if not network.quantized:
        for bits in BITS:
            yield f"kc.quantize(module, bits={bits})", lambda bits=bits: quantize(module, bits)  # type: ignore[misc]
    if not isinstance(rnn, Recurrent):
        return
    dense = [name for name, formats in _formats(rnn).items() if None in formats]
    for rank in RANKS if dense else ():
        words = " and ".join(f'{name}="lowrank:r={rank}"' for name in dense)
        for bits in (8, 4):
            yield (
                f"{words}, trained or fitted anew, with kc.quantize(module, bits={bits}),",
                lambda rank=rank, bits=bits: quantize(_changed(module, rnn, rnn.hidden_size, rank), bits),  # type: ignore[misc]
            )
    for share in FEWER if module is rnn else ():
        hidden = int(share * rnn.hidden_size)
        if hidden > max(1, rnn.proj_size) and not any(fmt for formats in _formats(rnn).values() for fmt in formats):
            yield (
                f"hidden_size={hidden} with kc.quantize(module, bits=8)",
                lambda hidden=hidden: quantize(_changed(rnn, rnn, hidden, None), 8),  # type: ignore[misc]
            )


def _formats(rnn: Recurrent) -> dict[str, tuple[object, ...]]:
    return {"input_format": rnn.input_formats, "hidden_format": rnn.hidden_formats}


def _changed(module: nn.Module, rnn: Recurrent, hidden: int, rank: int | None) -> nn.Module:
    """A module of the same kind with another layer in it, whose weights mean nothing."""
    other = f"lowrank:r={rank}" if rank else None
    formats = {name: [fmt or other for fmt in given] for name, given in _formats(rnn).items()}
    layer = type(rnn)
    options: dict[str, object] = {
        "bias": rnn.bias,
        "shared": rnn.shared,
        "hidden_shared": rnn.hidden_shared,
        "pad_input": rnn.pad_input,
    }
    if rnn.NUMBERED:
        options |= {"num_layers": rnn.num_layers, "bidirectional": rnn.bidirectional}
        options |= {"proj_size": rnn.proj_size} if rnn.proj_size else {}
    else:
        formats = {name: given[0] for name, given in formats.items()}  # type: ignore[misc]
    made = layer(rnn.input_size, hidden, **formats, **options)  # type: ignore[arg-type]
    if module is rnn:
        return made.eval()
    whole = copy.deepcopy(module)
    place = next(name for name, child in module.named_children() if child is rnn)
    setattr(whole, place, made)
    return whole.eval()

"""The functions of a network - state, reset, step, run, predict - and the header that declares them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kronecell.deploy.c_source import helpers
from kronecell.deploy.c_source.parts import Layer, Matrix, Network, flat
from kronecell.deploy.c_source.products import Product, product
from kronecell.deploy.c_source.source import Source


@dataclass(frozen=True)
class Written:
    """The two files, and what they take."""

    header: str
    source: str
    products: tuple[tuple[Matrix, Product], ...]
    array_bytes: int
    state_bytes: int
    work_bytes: int  # for each step of name_run
    macs: int  # of a step


def write_network(network: Network, name: str, prefer: str) -> Written:
    """The text of NAME.h and NAME.c."""
    writer = _Network(network, name, prefer)
    functions = writer.functions()
    state_bytes = 4 * (writer.state_floats + max(1, writer.scratch))
    header = writer.header(state_bytes)
    head = f'/* Written by kronecell; see {name}.h. */\n#include "{name}.h"\n\n'
    source = head + writer.source.text() + "\n" + functions
    made = tuple(writer.products)
    macs = sum(p.macs for _, p in made)
    return Written(header, source, made, writer.source.num_bytes, state_bytes, 4 * writer.work, macs)


class _Network:
    def __init__(self, network: Network, name: str, prefer: str) -> None:
        self.network, self.name, self.prefer = network, name, prefer
        self.source = Source()
        self.products: list[tuple[Matrix, Product]] = []
        self.layers = flat(network.layers)
        self.scratch = 0
        self.one_step = self.source.fresh("one_step")
        self.calls = {
            layer.name: self._layer(layer, number < network.directions) for number, layer in enumerate(self.layers)
        }
        if network.head is not None:
            self.head = self._product(network.head, network.bytes and not self.layers)
            self.scratch = max(self.scratch, self.head.scratch)
            bias = network.head_bias
            self.head_bias = None if bias is None else self.source.floats("head_bias", bias)
        classes = len(network.classifier.classes) if network.classifier else 0
        self.state_floats = sum(layer.outputs + (layer.hidden if layer.gates == 4 else 0) for layer in self.layers)
        if self.readout == "mean":
            self.state_floats += network.layers[-1][0].outputs + 1  # the sum of outputs, and their number
        self.scores = self.scratch
        self.scratch += classes  # of a segment, in name_predict

    @property
    def several(self) -> bool:
        """Whether a run has more than one direction."""
        return self.network.directions > 1

    @property
    def readout(self) -> str:
        """What the head of a classifier reads."""
        return self.network.classifier.readout if self.network.classifier else "last"

    @property
    def whole_segments(self) -> bool:
        """Whether a step needs to know all frames of its segment."""
        return self.network.classifier is not None and self.network.classifier.normalise == "clip"

    @property
    def work(self) -> int:
        """Floats of a run's workspace for each step."""
        return self.network.outputs if self.several and len(self.network.layers) > 1 else 0

    @property
    def kind(self) -> str:
        """What x is made of."""
        return "uint8_t" if self.network.bytes else "float"

    def _product(self, matrix: Matrix, of_bytes: bool) -> Product:
        made = product(self.source, matrix, of_bytes, self.prefer)
        self.products.append((matrix, made))
        return made

    # Layers ------------------------------------------------------------------------------------------------------

    def _layer(self, layer: Layer, first: bool) -> str:
        """The function of one step of a layer; returns its name."""
        source, rows = self.source, layer.gates * layer.hidden
        of_bytes = first and self.network.bytes
        W, U = self._product(layer.W, of_bytes), self._product(layer.U, False)
        P = None if layer.project is None else self._product(layer.project, False)
        kind = "uint8_t" if of_bytes else "float"
        states = "float *h, float *c" if layer.gates == 4 else "float *h"
        lines = ["    float *gates = t;"]
        after = rows if layer.gates == 4 else 2 * rows
        if layer.gates == 3:
            lines.append(f"    float *of_h = t + {rows};")
        rest = "rest" if max(W.scratch, U.scratch, P.scratch if P else 0) or P else "t"
        if rest == "rest":
            lines.append(f"    float *rest = t + {after};")
        lines.append("")
        lines += self._projected(layer, W, rest, first)
        if layer.gates == 4:
            lines.append(f"    {U.name}(h, gates, {rest});")
        else:
            lines += self._start("of_h", None if layer.bias_n is None else (layer, layer.bias_n), layer.hidden)
            lines.append(f"    {U.name}(h, of_h, {rest});")
        scratch = after + max(W.scratch, U.scratch)
        if layer.gates == 3:
            lines.append(f"    {source.activation('gru', helpers.GRU)}(gates, of_h, h, {layer.hidden});")
        elif P is None:
            lines.append(f"    {source.activation('lstm', helpers.LSTM)}(gates, h, c, {layer.hidden});")
        else:
            lines.append(f"    {source.activation('lstm', helpers.LSTM)}(gates, rest, c, {layer.hidden});")
            lines.append(f"    {source.zero()}(h, {layer.outputs});")
            lines.append(f"    {P.name}(rest, h, t);")
            scratch = max(scratch, after + layer.hidden)
            assert P.scratch <= after
        self.scratch = max(self.scratch, scratch)
        name = source.fresh(f"layer_{layer.name}")
        moments = ", float mean, float rate" if first and self.whole_segments else ""
        head = f"static void {name}(const {kind} *x, {states}, float *t{moments})"
        source.functions.append("\n".join([f"/* one step of layer {layer.name} */", head, "{", *lines, "}", ""]))
        return name

    def _start(self, where: str, bias: tuple[Layer, Tensor] | None, hidden: int) -> list[str]:
        """What a GRU's product with h starts from: zeros, and for the gate n its bias."""
        if bias is None:
            return [f"    {self.source.zero()}({where}, {3 * hidden});"]
        array = self.source.floats(f"bias_n_{bias[0].name}", bias[1])
        return [
            f"    {self.source.zero()}({where}, {2 * hidden});",
            f"    {self.source.copy()}({where} + {2 * hidden}, {array}, {hidden});",
        ]

    def _projected(self, layer: Layer, W: Product, rest: str, first: bool) -> list[str]:
        """gates = W x + b, for x as the layer reads it."""
        source, rows, parts = self.source, layer.gates * layer.hidden, self.network.classifier
        bias = torch.zeros(rows) if layer.bias is None else layer.bias
        if not first or parts is None:
            if layer.bias is None:
                return [f"    {source.zero()}(gates, {rows});", f"    {W.name}(x, gates, {rest});"]
            array = source.floats(f"bias_{layer.name}", bias)
            return [f"    {source.copy()}(gates, {array}, {rows});", f"    {W.name}(x, gates, {rest});"]
        lines = [f"    {source.zero()}(gates, {rows});", f"    {W.name}(x, gates, {rest});"]
        ones = layer.W.of_ones()
        if parts.normalise == "pixel":  # (x / 255 - mean) gain
            array = source.floats(f"bias_{layer.name}", bias.double() - parts.mean * parts.gain * ones)
            function = source.other("scale_and_add", helpers.SCALE)
            return [*lines, f"    {function}(gates, {array}, {_number(parts.gain / 255)}, {rows});"]
        array, of_ones = source.floats(f"bias_{layer.name}", bias), source.floats(f"ones_{layer.name}", ones)
        moments = source.other("moments", helpers.MOMENTS)
        affine = source.other("affine", helpers.AFFINE)
        if not self.whole_segments:
            lines.insert(0, "    float mean, rate;\n")
            lines.append(f"    {moments}(x, {layer.W.inputs}, &mean, &rate);")
        lines.append(f"    rate *= {_number(parts.gain)};")
        lines.append(f"    {affine}(gates, {array}, {of_ones}, rate, -mean * rate, {rows});")
        return lines

    # The network -------------------------------------------------------------------------------------------------

    def functions(self) -> str:
        """Those that the header declares."""
        parts = [self._reset()]
        if not self.several:
            parts.append(self._step())
        if self.network.classifier is not None:
            parts += [self._add(), self._predict()]
        else:
            parts.append(self._run_both() if self.several else self._run())
        return "\n".join(parts)

    def declarations(self) -> dict[str, str]:
        """What each of them is, without the ending."""
        name, kind = self.name, self.kind
        found = {"reset": f"void {name}_reset({name}_state *state)"}
        if not self.several and not self.whole_segments:
            found["step"] = f"void {name}_step({name}_state *state, const {kind} *x, float *y)"
        if self.network.classifier is not None:
            found["add"] = f"void {name}_add(const float *scores, size_t segments, float *chances)"
            found["predict"] = (
                f"size_t {name}_predict({name}_state *state, const uint8_t *frames, size_t segments, size_t steps, "
                "float *chances)"
            )
        else:
            work = ", float *work" if self.work else ""
            found["run"] = f"void {name}_run({name}_state *state, const {kind} *x, size_t steps, float *y{work})"
        return found

    def _reset(self) -> str:
        lines, count = [], len(self.layers)
        if count:
            zero = self.source.zero()
            first = self.layers[0]
            lines.append(f"    for (size_t k = 0; k < {count}; k++) {{")
            lines.append(f"        {zero}(state->h[k], {first.outputs});")
            if first.gates == 4:
                lines.append(f"        {zero}(state->c[k], {first.hidden});")
            lines.append("    }")
            if self.readout == "mean":
                lines += [f"    {zero}(state->total, {first.outputs});", "    state->frames = 0.0f;"]
        else:
            lines.append("    (void)state;")
        return "\n".join([self.declarations()["reset"], "{", *lines, "}", ""])

    def _call(self, number: int, x: str) -> str:
        layer = self.layers[number]
        c = f"state->c[{number}], " if layer.gates == 4 else ""
        moments = ", mean, rate" if number == 0 and self.whole_segments else ""
        return f"{self.calls[layer.name]}({x}, state->h[{number}], {c}state->scratch{moments});"

    def _step(self) -> str:
        lines = []
        x = "x"
        for number in range(len(self.layers)):
            lines.append("    " + self._call(number, x))
            x = f"state->h[{number}]"
        if self.readout == "mean":
            lines += [
                f"    for (size_t k = 0; k < {self.layers[-1].outputs}; k++)",
                f"        state->total[k] += {x}[k];",
                "    state->frames += 1.0f;",
            ]
            x = "state->total"
        if self.network.head is None:
            lines.append(f"    {self.source.copy()}(y, {x}, {self.network.outputs});")
        elif self.network.classifier:
            lines += ["    if (y) {", *(f"    {line}" for line in self._scored(x)), "    }"]
        else:
            lines += self._scored(x)
        if self.whole_segments:
            kind = f"const {self.kind} *x, float *y, float mean, float rate"
            head = f"static void {self.one_step}({self.name}_state *state, {kind})"
        else:
            head = self.declarations()["step"]
        return "\n".join([head, "{", *lines, "}", ""])

    def _scored(self, x: str) -> list[str]:
        """y = head x + bias, where x may be a sum over frames."""
        outputs, product = self.network.outputs, f"    {self.head.name}({x}, y, state->scratch);"
        if self.readout == "mean":
            bias = self.head_bias or self.source.floats("head_bias", torch.zeros(outputs))
            scaled = self.source.other("scale_and_add", helpers.SCALE)
            mean = f"    {scaled}(y, {bias}, 1.0f / state->frames, {outputs});"
            return [f"    {self.source.zero()}(y, {outputs});", product, mean]
        if self.head_bias is None:
            return [f"    {self.source.zero()}(y, {outputs});", product]
        return [f"    {self.source.copy()}(y, {self.head_bias}, {outputs});", product]

    def _run(self) -> str:
        loop = [
            "    for (size_t step = 0; step < steps; step++)",
            f"        {self.name}_step(state, x + step * {self.network.inputs}, y + step * {self.network.outputs});",
        ]
        return "\n".join([self.declarations()["run"], "{", *loop, "}", ""])

    def _run_both(self) -> str:
        """Layer after layer: the second direction needs all steps of the layer before."""
        lines, x, width = [], "x", self.network.inputs
        depth = len(self.network.layers)
        total = self.network.outputs
        for number in range(depth):
            target = "y" if (depth - 1 - number) % 2 == 0 else "work"
            for direction in range(2):
                at = 2 * number + direction
                outputs = self.layers[at].outputs
                step = "step - 1" if direction else "step"
                loop = "size_t step = steps; step > 0; step--" if direction else "size_t step = 0; step < steps; step++"
                lines.append(f"    for ({loop}) {{")
                lines.append("        " + self._call(at, f"{x} + ({step}) * {width}"))
                place = f"{target} + ({step}) * {total} + {direction * outputs}"
                lines.append(f"        {self.source.copy()}({place}, state->h[{at}], {outputs});")
                lines.append("    }")
            x, width = target, total
        return "\n".join([self.declarations()["run"], "{", *lines, "}", ""]).replace("(step) *", "step *")

    def _add(self) -> str:
        classes, exponential = self.network.outputs, self.source.exponential()
        return f"""{self.declarations()["add"]}
{{
    float largest = scores[0], sum = 0.0f;
    for (size_t k = 1; k < {classes}; k++)
        largest = scores[k] > largest ? scores[k] : largest;
    for (size_t k = 0; k < {classes}; k++)
        sum += {exponential}(scores[k] - largest);
    for (size_t k = 0; k < {classes}; k++)
        chances[k] += {exponential}(scores[k] - largest) / (sum * (float)segments);
}}
"""

    def _predict(self) -> str:
        classes, inputs, name = self.network.outputs, self.network.inputs, self.name
        step, moments, found, given = f"{name}_step", "", "", ""
        if self.whole_segments:
            step, moments, given = self.one_step, ", mean, rate", ", mean, rate"
            found = f"\n        moments(frames + segment * steps * {inputs}, steps * {inputs}, &mean, &rate);"
        return f"""{self.declarations()["predict"]}
{{
    float *scores = state->scratch + {self.scores}{moments};
    size_t best = 0;
    {self.source.zero()}(chances, {classes});
    for (size_t segment = 0; segment < segments; segment++) {{
        {name}_reset(state);{found}
        for (size_t step = 0; step < steps; step++)
            {step}(state, frames + (segment * steps + step) * {inputs}, step + 1 < steps ? NULL : scores{given});
        {name}_add(scores, segments, chances);
    }}
    for (size_t k = 1; k < {classes}; k++)
        best = chances[k] > chances[best] ? k : best;
    return best;
}}
"""

    # The header --------------------------------------------------------------------------------------------------

    def header(self, state_bytes: int) -> str:
        """NAME.h."""
        network, name, upper = self.network, self.name, self.name.upper()
        sizes = [f"#define {upper}_INPUTS {network.inputs}", f"#define {upper}_OUTPUTS {network.outputs}"]
        if self.work:
            sizes.append(f"#define {upper}_WORK(steps) ((size_t)(steps) * {self.work})")
        fields = []
        if self.layers:
            first, count = self.layers[0], len(self.layers)
            sizes.append(f"#define {upper}_LAYERS {count}")
            fields.append(f"    float h[{count}][{first.outputs}];")
            if first.gates == 4:
                fields.append(f"    float c[{count}][{first.hidden}];")
        if self.readout == "mean":
            fields.append(f"    float total[{self.layers[-1].outputs}], frames;")
        fields.append(f"    float scratch[{max(1, self.scratch)}];")
        guard, declared = f"{upper}_H", self.declarations()
        texts = [f"{_about(key, network, name, self.kind)}\n{text};" for key, text in declared.items()]
        if network.classifier is not None:
            names = ", ".join(_comment(label) for label in network.classifier.classes)
            sizes.append(f"/* classes: {names} */")
        return (
            f"/* Written by kronecell. {self.source.num_bytes} bytes of const arrays, {state_bytes} bytes of state;\n"
            "   C99, no library, no allocation, nothing global. */\n"
            f"#ifndef {guard}\n#define {guard}\n\n#include <stddef.h>\n#include <stdint.h>\n\n"
            '#ifdef __cplusplus\nextern "C" {\n#endif\n\n' + "\n".join(sizes) + "\n\n"
            "/* What a sequence remembers; h and c may be read and set between steps, scratch means nothing then. */\n"
            "typedef struct {\n" + "\n".join(fields) + f"\n}} {name}_state;\n\n" + "\n\n".join(texts) + "\n\n"
            "#ifdef __cplusplus\n}\n#endif\n\n#endif\n"
        )


def _about(key: str, network: Network, name: str, kind: str) -> str:
    upper = name.upper()
    if key == "reset":
        return "/* The state before the first step: zeros. */"
    if key == "step" and network.classifier is not None:
        return (
            f"/* One frame of {upper}_INPUTS bytes; y gets the scores of {upper}_OUTPUTS classes so far, or is NULL. */"
        )
    if key == "step":
        return f"/* One time step: {upper}_INPUTS of x -> {upper}_OUTPUTS of y. */"
    if key == "add":
        return (
            "/* After the last frame of a segment: its probabilities, divided by the number of segments, are added to\n"
            "   chances, which start at zero. */"
        )
    if key == "predict":
        return (
            "/* The class of a clip: `segments` times `steps` frames, one after the other; chances gets the mean\n"
            "   probability of every class. */"
        )
    work = (
        f"; work has {upper}_WORK(steps) floats"
        if "WORK" and network.directions > 1 and len(network.layers) > 1
        else ""
    )
    return f"/* `steps` time steps of x, one after the other, to as many of y{work}. */"


def _number(value: float) -> str:
    text = f"{torch.tensor(value, dtype=torch.float32).item():.9g}"
    return text + ("f" if "." in text or "e" in text else ".0f")


def _comment(text: str) -> str:
    """Any text, safe inside a comment of C."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in " -_.,()") else "?" for c in text)
    return plain[:60]

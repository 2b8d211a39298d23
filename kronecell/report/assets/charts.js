"use strict";
// Charts of the report: lines with bands, a scatter, stacked bars; and tables that sort. All names go in as text nodes.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
  const full = new Intl.NumberFormat("en", { maximumFractionDigits: 4 });
  const colour = (i) => `var(--c${i % 10})`;
  const dashes = ["", "7 4", "2 3", "9 3 2 3"];
  const dash = (i) => dashes[Math.floor(i / 10) % 4];

  function svg(tag, attributes, parent) {
    const node = document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (parent) parent.appendChild(node);
    return node;
  }
  function text(parent, words, attributes) {
    const node = svg("text", attributes, parent);
    node.textContent = words;
    return node;
  }
  function html(tag, parent, words, name) {
    const node = document.createElement(tag);
    if (words !== undefined) node.textContent = words;
    if (name) node.className = name;
    if (parent) parent.appendChild(node);
    return node;
  }

  // Scales -----------------------------------------------------------------------------------------------------
  function scale(low, high, from, to, log, whole) {
    if (log) { low = Math.log10(low); high = Math.log10(high); }
    if (!(high > low)) { low -= 0.5; high += 0.5; }
    const pad = (high - low) * 0.05;
    low -= pad; high += pad;
    const map = (v) => from + (((log ? Math.log10(v) : v) - low) / (high - low)) * (to - from);
    const inside = (t) => t >= low && t <= high;
    map.ticks = [];
    if (log) {
      const sub = high - low < 1.6 ? [1, 2, 5] : high - low < 0.7 ? [1, 2, 3, 5, 7] : [1];
      for (let p = Math.floor(low); p <= Math.ceil(high); p++)
        for (const s of sub) if (inside(p + Math.log10(s))) map.ticks.push(s * 10 ** p);
      if (map.ticks.length < 2) map.ticks = [10 ** (low + pad), 10 ** (high - pad)];
    } else {
      const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
      const step = Math.max(whole ? 1 : 0, [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough));
      for (let t = Math.ceil(low / step) * step; t <= high + 1e-12; t += step) map.ticks.push(Math.abs(t) < step / 1e6 ? 0 : t);
    }
    return map;
  }
  function frame(box, height) {
    const width = printing ? 1010 : Math.max(280, box.clientWidth - 14);
    const old = box.querySelector("svg");
    if (old) old.remove();
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height });
    box.prepend(root);
    return { root, width, height, left: 58, right: width - 14, top: 14, bottom: height - 44 };
  }
  function axes(f, x, y, titles, show) {
    for (const t of y.ticks) {
      svg("line", { class: "grid", x1: f.left, x2: f.right, y1: y(t), y2: y(t) }, f.root);
      text(f.root, show.y(t), { class: "tick", x: f.left - 6, y: y(t) + 4, "text-anchor": "end" });
    }
    let last = -1e9;
    for (const t of x.ticks) {
      const at = x(t), words = show.x(t);
      svg("line", { class: "grid", x1: at, x2: at, y1: f.top, y2: f.bottom }, f.root);
      if (at - last < 8 + 7 * words.length) continue;
      const edge = f.width - 3.6 * words.length; // a long number at the end of the axis stays inside
      text(f.root, words, { class: "tick", x: Math.min(at, edge), y: f.bottom + 17, "text-anchor": "middle" });
      last = at;
    }
    svg("line", { class: "axis", x1: f.left, x2: f.right, y1: f.bottom, y2: f.bottom }, f.root);
    svg("line", { class: "axis", x1: f.left, x2: f.left, y1: f.top, y2: f.bottom }, f.root);
    const below = text(f.root, titles.x, { x: (f.left + f.right) / 2, y: f.height - 6, "text-anchor": "middle" });
    const long = below.getComputedTextLength(), room = f.width - 12;
    if (long > f.right - f.left) below.setAttribute("x", f.width / 2);
    if (long > room) below.style.fontSize = `${(12 * room) / long}px`; // a phone: smaller, but whole
    text(f.root, titles.y, { x: 13, y: (f.top + f.bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 13 ${(f.top + f.bottom) / 2})` });
  }
  function tipOf(box) {
    let tip = box.querySelector(".tip");
    if (!tip) { tip = html("div", box, undefined, "tip"); tip.setAttribute("role", "status"); }
    return {
      show(lines, x, y) {
        tip.textContent = "";
        for (const line of lines) {
          const row = html("div", tip);
          if (line.colour) { const s = html("span", row, undefined, "swatch"); s.style.background = line.colour; }
          html(line.bold ? "b" : "span", row, line.text);
        }
        const wide = tip.offsetWidth, room = box.clientWidth;
        tip.style.left = Math.max(4, Math.min(x + 14 + wide > room ? x - wide - 10 : x + 14, room - wide - 4)) + "px";
        tip.style.top = Math.max(2, y - 10) + "px";
        tip.style.visibility = "visible";
      },
      hide() { tip.style.visibility = "hidden"; },
    };
  }
  const hidden = new Set();
  let printing = false; // paper has its own width, and two charts share a page
  // The names of `groups` below a chart; each is drawn as in it and hides its group in all charts.
  function legend(box, groups, mark) {
    const list = html("div", undefined, undefined, "legend");
    box.after(list);
    for (const [i, group] of data.groups.entries()) {
      if (!groups(group)) continue;
      const button = html("button", list, undefined, "pick");
      button.type = "button";
      button.dataset.group = i;
      button.setAttribute("aria-pressed", "true");
      mark(svg("svg", { class: "mark", width: 26, height: 14, "aria-hidden": "true" }, button), i, group);
      button.append(group.label + (group.stopped ? " (stopped)" : ""));
      button.addEventListener("click", () => {
        hidden.has(i) ? hidden.delete(i) : hidden.add(i);
        document.querySelectorAll(`.pick[data-group="${i}"]`).forEach((twin) => twin.setAttribute("aria-pressed", String(!hidden.has(i))));
        all.forEach((draw) => draw());
      });
    }
    return list;
  }
  const line = (parent, i) => svg("line", { x1: 0, x2: 22, y1: 7, y2: 7, stroke: colour(i), "stroke-width": 3, "stroke-dasharray": dash(i) }, parent);
  const look = (i, stopped) => stopped ? { fill: "var(--paper)", stroke: colour(i), "stroke-width": 2.5 } : { fill: colour(i), stroke: "var(--paper)" };
  const all = [];
  const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);

  // Learning curves --------------------------------------------------------------------------------------------
  function curves(box) {
    const metric = document.getElementById("metric"), base = document.getElementById("base"), log = document.getElementById("logy");
    const tip = tipOf(box);
    function draw() {
      const key = metric.value, time = base.value, share = key !== "loss";
      const lines = data.groups.map((g, i) => ({ i, label: g.label, points: g.curves[key] || [] }))
        .filter((l) => l.points.length && !hidden.has(l.i));
      const usable = (v) => !log.checked || v > 0;
      const f = frame(box, printing ? 225 : 340);
      const ys = lines.flatMap((l) => l.points.flatMap((p) => [p.low, p.high])).filter(usable);
      const xs = lines.flatMap((l) => l.points.map((p) => p[time]));
      if (!ys.length) { text(f.root, "nothing to show yet", { x: f.width / 2, y: 160, "text-anchor": "middle" }); return; }
      const x = scale(...extent(xs), f.left, f.right, false, time === "epoch"), y = scale(...extent(ys), f.bottom, f.top, log.checked);
      const percent = (v) => full.format(Math.round(v * 1000) / 10) + "%";
      const showY = share ? percent : (v) => full.format(Number(v.toPrecision(4)));
      axes(f, x, y, { x: time === "epoch" ? "epoch" : "seconds of training", y: metric.selectedOptions[0].text }, { x: compact.format.bind(compact), y: showY });
      for (const l of lines) {
        const pts = l.points.filter((p) => usable(p.low) && usable(p.mean));
        if (pts.some((p) => p.high > p.low)) {
          const d = pts.map((p) => `${x(p[time])},${y(p.high)}`).concat(pts.slice().reverse().map((p) => `${x(p[time])},${y(p.low)}`));
          svg("polygon", { points: d.join(" "), fill: colour(l.i), opacity: 0.16 }, f.root);
        }
        // The mean of all runs; then, thin and apart, that of the runs which went on when others had ended.
        const most = Math.max(...pts.map((p) => p.count)), end = pts.map((p) => p.count).lastIndexOf(most) + 1;
        for (const [part, width] of [[pts.slice(0, end).filter((p) => p.count === most), 2], [pts.slice(end), 1]])
          if (part.length) svg("polyline", { points: part.map((p) => `${x(p[time])},${y(p.mean)}`).join(" "), fill: "none", stroke: colour(l.i), "stroke-width": width, "stroke-dasharray": dash(l.i) }, f.root);
        if (pts.length < 25) for (const p of pts) svg("circle", { cx: x(p[time]), cy: y(p.mean), r: 2.6, fill: colour(l.i) }, f.root);
      }
      const cross = svg("line", { class: "axis", y1: f.top, y2: f.bottom, x1: -9, x2: -9, "stroke-dasharray": "3 3" }, f.root);
      f.root.addEventListener("pointermove", (event) => {
        const at = event.clientX - f.root.getBoundingClientRect().left;
        const near = lines.map((l) => l.points.reduce((a, b) => (Math.abs(x(b[time]) - at) < Math.abs(x(a[time]) - at) ? b : a)));
        const centre = near.reduce((a, b) => (Math.abs(x(b[time]) - at) < Math.abs(x(a[time]) - at) ? b : a));
        const shown = lines.map((l, n) => ({ l, p: near[n] })).filter(({ p }) => Math.abs(x(p[time]) - x(centre[time])) < 12).sort((a, b) => b.p.mean - a.p.mean);
        cross.setAttribute("x1", x(centre[time])); cross.setAttribute("x2", x(centre[time]));
        const head = time === "epoch" ? `epoch ${centre.epoch}` : `${full.format(centre.seconds)} s`;
        tip.show([{ text: head, bold: true }].concat(shown.map(({ l, p }) => ({
          colour: colour(l.i),
          text: `${l.label}: ${showY(p.mean)}` + (p.count > 1 ? ` (${showY(p.low)} to ${showY(p.high)}, ${p.count} runs)` : ""),
        }))), x(centre[time]), event.clientY - box.getBoundingClientRect().top);
      });
      f.root.addEventListener("pointerleave", () => { tip.hide(); cross.setAttribute("x1", -9); cross.setAttribute("x2", -9); });
    }
    metric.addEventListener("change", () => { log.checked = metric.value === "loss" && log.checked; draw(); });
    base.addEventListener("change", draw); log.addEventListener("change", draw);
    all.push(draw);
    legend(box, (group) => Object.values(group.curves).some((points) => points.length), line);
    draw();
  }

  // Accuracy against cost --------------------------------------------------------------------------------------
  // The bar of a point: its 95% interval where that is known, else the range over the runs.
  const around = (a) => ({ ...a, low: a.from ?? a.low, high: a.to ?? a.high, sure: a.from !== null });
  function scatter(box) {
    const cost = document.getElementById("cost"), log = document.getElementById("logx"), tip = tipOf(box);
    const names = legend(box, (group) => group.accuracy, (parent, i, group) => svg("circle", { cx: 13, cy: 7, r: 5, ...look(i, group.stopped) }, parent));
    function draw() {
      let nameless = hidden.size; // the legend is there for points without room for a name, and to show again what is hidden
      const points = data.groups.map((g, i) => ({ i, label: g.label, format: g.format, x: g.costs[cost.value], top: g.accuracy && around(g.accuracy), stopped: g.stopped }))
        .filter((p) => p.x > 0 && p.top && !hidden.has(p.i));
      const f = frame(box, printing ? 245 : 360);
      names.hidden = !nameless;
      if (!points.length) { text(f.root, "no finished run yet", { x: f.width / 2, y: 170, "text-anchor": "middle" }); return; }
      const x = scale(...extent(points.map((p) => p.x)), f.left, f.right, log.checked);
      const y = scale(...extent(points.flatMap((p) => [p.top.low, p.top.high])), f.bottom, f.top, false);
      const percent = (v) => full.format(Math.round(v * 1000) / 10) + "%";
      axes(f, x, y, { x: cost.selectedOptions[0].text + (cost.value === "latency_ms" && data.threads ? `, ${data.threads}` : ""), y: "accuracy, last epoch" }, { x: (v) => compact.format(v), y: percent });
      const taken = points.map((p) => [x(p.x) - 8, y(p.top.mean) - 8, x(p.x) + 8, y(p.top.mean) + 8])
        .concat(points.map((p) => [x(p.x) - 1, y(p.top.high), x(p.x) + 1, y(p.top.low)]));
      const clash = (b) => b[0] < f.left || b[2] > f.right || b[1] < f.top || b[3] > f.bottom || taken.some((t) => b[0] < t[2] && b[2] > t[0] && b[1] < t[3] && b[3] > t[1]);
      for (const p of points) {
        const cx = x(p.x), cy = y(p.top.mean);
        svg("line", { x1: cx, x2: cx, y1: y(p.top.low), y2: y(p.top.high), stroke: colour(p.i), "stroke-width": 2 }, f.root);
        const words = p.stopped ? `${p.label} (stopped)` : p.label;
        const range = p.top.sure ? `95% interval ${percent(p.top.low)} to ${percent(p.top.high)}` : p.top.count > 1 ? `${percent(p.top.low)} to ${percent(p.top.high)} from run to run` : "interval unknown";
        const about = `accuracy ${percent(p.top.mean)}, ${range}, ${p.top.count === 1 ? "one run" : p.top.count + " runs"}`;
        const dot = svg("circle", {
          cx, cy, r: 7, class: p.stopped ? "point hollow" : "point", tabindex: 0, role: "img",
          ...look(p.i, p.stopped),
          "aria-label": `${words}: ${about}, ${cost.selectedOptions[0].text} ${full.format(p.x)}`,
        }, f.root);
        const show = () => tip.show([{ text: p.label, bold: true }, { text: p.format }, { text: about }]
          .concat(p.stopped ? [{ text: p.stopped }] : [], [{ text: `${cost.selectedOptions[0].text}: ${full.format(p.x)}` }]), cx, cy);
        for (const kind of ["pointerenter", "pointerdown", "focus"]) dot.addEventListener(kind, show);
        for (const kind of ["pointerleave", "blur"]) dot.addEventListener(kind, tip.hide);
        const short = words.length > 30 ? words.slice(0, 29) + "…" : words, w = 6.8 * short.length;
        nameless++;
        for (const [dx, dy, anchor] of [[11, 4, "start"], [-11, 4, "end"], [11, -10, "start"], [11, 18, "start"], [-11, -10, "end"], [-11, 18, "end"], [11, 32, "start"], [-11, 32, "end"]]) {
          const x0 = anchor === "start" ? cx + dx : anchor === "end" ? cx + dx - w : cx - w / 2;
          const b = [x0, cy + dy - 11, x0 + w, cy + dy + 3];
          const away = (q) => Math.hypot(Math.max(b[0] - x(q.x), 0, x(q.x) - b[2]), Math.max(b[1] - y(q.top.mean), 0, y(q.top.mean) - b[3]));
          if (clash(b) || points.some((q) => q !== p && away(q) <= away(p))) continue; // nor beside another point
          nameless--;
          taken.push(b);
          text(f.root, short, { x: cx + dx, y: cy + dy, "text-anchor": anchor });
          break;
        }
      }
      names.hidden = !nameless;
    }
    cost.addEventListener("change", draw); log.addEventListener("change", draw);
    all.push(draw); draw();
  }

  // Where the parameters are -----------------------------------------------------------------------------------
  function bars(box) {
    const tip = tipOf(box), parts = ["W", "U", "bias", "classifier", "other"];
    function draw() {
      const groups = data.groups.filter((g) => Object.keys(g.parameters).length);
      const line = printing ? 34 : 46, thick = printing ? 11 : 18, f = frame(box, groups.length * line + 12);
      const sum = (g) => Object.values(g.parameters).reduce((a, b) => a + b, 0), largest = Math.max(...groups.map(sum));
      groups.forEach((g, n) => {
        const total = sum(g), top = n * line + 4;
        const above = text(f.root, `${g.label}: ${g.total}`, { x: 2, y: top + 12 });
        for (let name = g.label; name.length > 4 && above.getComputedTextLength() > f.width - 4; )
          above.textContent = `${(name = name.slice(0, -1))}…: ${g.total}`;
        let at = 0;
        parts.forEach((part, i) => {
          const value = g.parameters[part];
          if (!value || value < 0) return;
          const w = (value / largest) * f.width;  // one scale for all: lengths compare
          const r = svg("rect", { x: at, y: top + 18, width: Math.max(w, 0.5), height: thick, fill: `var(--p${i})`, class: "bar" }, f.root);
          const show = (event) => tip.show([{ text: g.label, bold: true }, { colour: `var(--p${i})`, text: `${part}: ${full.format(value)} of ${full.format(total)} parameters, ${((100 * value) / total).toFixed(2)}%` }], event.clientX - box.getBoundingClientRect().left, top + 30);
          r.addEventListener("pointermove", show); r.addEventListener("pointerdown", show); r.addEventListener("pointerleave", tip.hide);
          at += w;
        });
      });
    }
    const list = html("div", undefined, undefined, "legend");
    box.after(list);
    parts.forEach((part, i) => {
      if (!data.groups.some((g) => g.parameters[part])) return;
      const item = html("span", list), mark = html("span", item, undefined, "swatch box");
      mark.style.background = `var(--p${i})`;
      item.append({ W: "W, input weights", U: "U, recurrent weights", bias: "biases", classifier: "classifier", other: "other" }[part]);
    });
    all.push(draw); draw();
  }

  // Tables -----------------------------------------------------------------------------------------------------
  function sortable(table) {
    table.querySelectorAll("thead th").forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending", body = table.tBodies[0];
        const value = (row) => row.cells[column].dataset.sort ?? "";
        const rows = [...body.rows].sort((a, b) => {
          const p = value(a), q = value(b);
          if ((p === "") !== (q === "")) return p === "" ? 1 : -1; // empty cells stay last either way
          const order = p !== "" && !isNaN(p) && !isNaN(q) ? p - q : p.localeCompare(q);
          return up ? order : -order;
        });
        table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        body.append(...rows);
      });
    });
  }

  const charts = { curves, scatter, bars };
  document.querySelectorAll("[data-chart]").forEach((box) => charts[box.dataset.chart](box));
  document.querySelectorAll("table.sortable").forEach(sortable);
  let wait = 0, width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(wait);
    wait = setTimeout(() => all.forEach((draw) => draw()), 80);
  });
  window.addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("details").forEach((d) => { d.open = true; });
    all.forEach((draw) => draw());
  });
  window.addEventListener("afterprint", () => { printing = false; all.forEach((draw) => draw()); });
})();

"use strict";
// Sends the form to the server and shows what comes back. Nothing is computed here but the layout of numbers.
(function () {
  const form = document.getElementById("form"), byId = (id) => document.getElementById(id);
  const show = new Intl.NumberFormat("en", { maximumFractionDigits: 20 });
  const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const NAMES = {
    dense: "dense", lowrank: "low rank", cp: "CP", tucker: "Tucker", tt: "tensor train", tr: "tensor ring",
    bt: "block term", ht: "hierarchical Tucker", kt: "Kronecker sum", kcp: "Kronecker CP",
  };
  let asked = 0, wait = 0, measureWait = 0, equations = {};

  function fill(select, values, chosen) {
    select.textContent = "";
    for (const [value, words] of values) {
      const option = document.createElement("option");
      option.value = value;
      option.textContent = words;
      option.selected = value === chosen;
      select.append(option);
    }
  }
  function rows(body, table) {
    body.textContent = "";
    for (const line of table) {
      const row = body.insertRow();
      line.cells.forEach((cell, i) => {
        const place = row.insertCell();
        place.textContent = cell;
        place.dataset.label = body.parentElement.tHead.rows[0].cells[i].textContent; // shown on a phone
        place.className = body.parentElement.tHead.rows[0].cells[i].className;
      });
      if (line.chosen) row.className = "chosen";
    }
  }
  const fields = () => new URLSearchParams(new FormData(form)).toString();
  const milliseconds = (ms) => short.format(ms) + " ms";

  async function ask() {
    const number = ++asked;
    byId("result").classList.add("stale");
    byId("measured").textContent = "…";
    byId("measured-note").textContent = "measuring";
    byId("equation").textContent = equations[form.kind.value] || "";
    let reply;
    try {
      reply = await (await fetch("/api/explore?" + fields())).json();
    } catch (error) {
      reply = { error: "the server does not answer: is kronecell explore still running?" };
    }
    if (number !== asked) return;
    byId("error").textContent = reply.error || "";
    if (reply.error) return;
    render(reply);
    byId("result").classList.remove("stale");
    clearTimeout(measureWait);
    measureWait = setTimeout(() => measure(number), 350);
  }
  async function measure(number) {
    let reply;
    try {
      reply = await (await fetch("/api/measure?" + fields())).json();
    } catch (error) {
      reply = { error: "the server does not answer" };
    }
    if (number !== asked) return;
    byId("measured").textContent = reply.ms ? milliseconds(reply.ms) : "not measured";
    byId("measured-note").textContent = reply.error || reply.why || (reply.dense_ms ? `dense ${milliseconds(reply.dense_ms)}; ` : "") + (reply.how || "");
  }
  function render(reply) {
    const count = reply.count;
    byId("params").textContent = show.format(count.params);
    byId("dense").textContent = show.format(count.dense_params);
    byId("ratio").textContent = short.format(count.compression_ratio) + "x";
    byId("params").dataset.value = count.params;
    byId("ratio").dataset.value = count.compression_ratio;
    const best = reply.predicted.find((way) => way.chosen) || reply.predicted[0];
    byId("predicted").textContent = milliseconds(best.ms);
    rows(byId("orders").tBodies[0], Object.entries(count.orders).map(([name, o]) => ({
      chosen: name === reply.order,
      cells: [name, show.format(o.macs), show.format(o.hoisted_macs), show.format(o.total_macs), show.format(o.peak)],
    })));
    rows(byId("ways").tBodies[0], reply.predicted.map((way) => ({
      chosen: way.chosen,
      cells: [way.name + (way.chosen ? "  (chosen)" : ""), short.format(way.price / 1e6), short.format(way.ms)],
    })));
    fill(form.order, Object.keys(count.orders).map((name) => [name, name]), reply.order);
    byId("order-name").textContent = reply.order;
    rows(byId("steps").tBodies[0], reply.steps.map(([step, pair, legs, macs, when]) => ({ cells: [step, pair, legs, show.format(macs), when] })));
    byId("python").textContent = reply.python;
    byId("command").textContent = reply.command;
    byId("drawing").innerHTML = reply.drawing; // made by the library, every name escaped
    form.m.placeholder = reply.m.join("x");
    form.n.placeholder = reply.n.join("x");
    const key = (pair) => pair.m.join("x") + " " + pair.n.join("x");
    const own = { m: reply.m, n: reply.n };
    const pairs = reply.modes.some((pair) => key(pair) === key(own)) ? reply.modes : [own].concat(reply.modes);
    fill(byId("modes"), pairs.map((pair) => [key(pair), pair.m.join("x") + "  to  " + pair.n.join("x")]), key(own));
    document.querySelectorAll("[data-rank]").forEach((label) => { label.hidden = !reply.ranks.includes(label.dataset.rank); });
  }
  byId("modes").addEventListener("change", () => {
    const [m, n] = byId("modes").value.split(" ");
    form.m.value = m;
    form.n.value = n;
    ask();
  });
  for (const name of ["M", "N", "kind"])
    form[name].addEventListener("input", () => { form.m.value = ""; form.n.value = ""; });
  form.addEventListener("input", (event) => {
    if (event.target.id === "modes") return;
    clearTimeout(wait);
    wait = setTimeout(ask, 120);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.nextElementSibling.textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1200);
  }));
  (async function () {
    equations = await (await fetch("/api/formats")).json();
    fill(form.kind, Object.keys(equations).map((kind) => [kind, `${kind}: ${NAMES[kind] || kind}`]), "kcp");
    ask();
  })();
})();

"use strict";
(() => {
  const [MISSING, WITHIN, EXPLAINED, HEALED, DIVERGED, NONFINITE] = [0, 1, 2, 3, 4, 5];
  const NAMES = ["not compared", "within", "explained", "healed", "diverged", "not finite"];
  const GLYPHS = [" ", "✓", "≈", "○", "✗", "!"];
  // Which quarters of a cell are dark: a state shows without its colour.
  const PATTERNS = { [EXPLAINED]: [1, 0, 1, 0], [HEALED]: [1, 1, 0, 0], [DIVERGED]: [1, 0, 0, 1], [NONFINITE]: [1, 1, 1, 1] };
  const SCALE = [[0, "#08519c"], [0.25, "#4393c3"], [0.4999, "#d1e5f0"], [0.5, "#fee0b6"], [0.75, "#e08214"], [1, "#7f3b08"]];
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const current = { run: 0, site: 0, step: 0 };
  let runs = [], plotly = null, forced = "";

  function bytes(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const raw = atob(text), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out;
  }
  const floats = (text) => new Float32Array(bytes(text).buffer);
  const unpacked = (id) => new Response(new Blob([bytes($(id).textContent)]).stream().pipeThrough(new DecompressionStream("gzip")), { headers: { "Content-Type": "text/javascript" } });
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const num = (v, digits = 3) => v === null || v === undefined || Number.isNaN(v) ? "–" : typeof v !== "number" ? String(v)
    : !Number.isFinite(v) ? (v > 0 ? "inf" : "-inf") : v === 0 ? "0" : Number.isInteger(v) && Math.abs(v) < 1e7 ? String(v)
    : Math.abs(v) >= 10 ** digits && Math.abs(v) < 1e5 ? String(Math.round(v)) : Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5 ? v.toPrecision(digits + 1) : v.toExponential(digits - 1);
  const el = (tag, text = "", cls = "") => { const e = document.createElement(tag); e.textContent = text; if (cls) e.className = cls; return e; };
  const plain = (v) => typeof v === "string" && ["nan", "inf", "-inf"].includes(v) ? { nan: NaN, inf: Infinity, "-inf": -Infinity }[v] : v;

  function prepare(run) {
    for (const name in run.columns) run.columns[name] = floats(run.columns[name]);
    run.state = bytes(run.state);
    run.rule_of = new Uint32Array(bytes(run.rule_of).buffer);
    run.width = run.sites.length;
    run.worst = run.sites.map((_, s) => {
      let best = -1;
      for (let t = 0; t < run.steps; t++) {
        const at = t * run.width + s;
        if (run.state[at] !== MISSING && (best < 0 || rank(run, at) > rank(run, best))) best = at;
      }
      return best;
    });
    run.text = run.sites.map((s) => Object.values(s).flat().join(" ").toLowerCase());
    [current.step, current.site] = run.start;
    return run;
  }
  const rank = (run, at) => (run.state[at] >= DIVERGED ? 1e6 : 0) + Math.min(run.columns.margin[at], 1e5);
  const run = () => runs[current.run];
  const root = () => $(`main[data-run="${current.run}"]`);
  const at = (step = current.step, site = current.site) => step * run().width + site;

  // Charts
  function layout(extra) {
    const front = css("--front"), line = css("--line");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
    const merged = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: front, size: 11 }, margin: { l: 58, r: 12, t: 8, b: 36 }, showlegend: false, dragmode: "zoom", ...extra };
    for (const name of Object.keys(merged)) if (/^[xy]axis/.test(name)) merged[name] = { ...axis, ...merged[name] };
    return merged;
  }
  const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  const draw = (node, traces, extra) => plotly.react(node, traces, layout(extra), CONFIG);

  const steps = (count) => Math.max(1, Math.ceil(count / 12));
  const wide = (values) => [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)) + 0.01)];

  function logged(values, all = values) {
    const finite = all.filter((v) => v > 0 && Number.isFinite(v));
    const low = finite.length ? Math.min(...finite) / 3 : 1e-9, high = finite.length ? Math.max(...finite) * 3 : 1;
    return values.map((v) => (v === null ? null : v === 0 ? low : Number.isFinite(v) ? v : high));
  }

  function depthTraces(r) {
    const { error, bound, floor, local, value } = r.columns, x = r.sites.map((_, i) => i), step = current.step;
    const pick = (column) => x.map((i) => (r.state[at(step, i)] === MISSING || Number.isNaN(column[at(step, i)]) ? null : column[at(step, i)]));
    const errors = pick(error), bounds = pick(bound).map((b, i) => (error[at(step, i)] === value[at(step, i)] && Number.isFinite(b) ? b : null));
    const states = x.map((i) => r.state[at(step, i)]);
    const floors = pick(floor), everything = [...errors, ...bounds, ...floors];
    const trace = (name, y, more) => ({ name, x, y: logged(y, everything), customdata: y.map((v) => num(v)), type: "scatter", xaxis: "x", yaxis: "y", mode: "lines", hovertemplate: `${name} %{customdata}<extra></extra>`, ...more });
    const traces = [
      trace("noise floor", floors, { line: { dash: "dot", color: css("--dim"), width: 1.5 } }),
      trace("bound", bounds, { line: { dash: "dash", color: css("--good"), width: 1.5 } }),
      trace("error", errors, {
        mode: "lines+markers", text: x.map((i) => r.sites[i].site), hovertemplate: "%{text}<br>error %{customdata}<extra></extra>",
        line: { color: css("--front"), width: 1.5 },
        marker: { size: states.map((s) => (s >= HEALED ? 8 : 4)), symbol: states.map((s) => ({ [HEALED]: "circle-open", [DIVERGED]: "x", [NONFINITE]: "star" })[s] || "circle"), color: states.map((s) => (s >= HEALED ? css("--bad") : css("--front"))) },
      }),
    ];
    const locals = pick(local);
    if (locals.some((v) => v !== null)) traces.push(trace("local error", locals, { mode: "markers", marker: { symbol: "diamond-open", size: 7, color: css("--mark") } }));
    return traces;
  }

  function heatTraces(r) {
    const z = [], text = [], dark = [], half = (k) => -0.25 + 0.5 * k;
    for (let t = 0; t < r.steps; t++) {
      const zs = [], ts = [], above = [], below = [];
      for (let s = 0; s < r.width; s++) {
        const i = t * r.width + s, m = r.columns.margin[i], p = PATTERNS[r.state[i]] || [0, 0, 0, 0], ink = r.state[i] === NONFINITE ? 2 : 1;
        zs.push(r.state[i] === MISSING ? null : Math.max(-2, Math.min(2, Number.isNaN(m) ? 2 : Math.log10(m))));
        ts.push(`${r.sites[s].site}<br>step ${t}: ${NAMES[r.state[i]]}, ${num(m)} x bound`);
        above.push(p[0] * ink || null, p[1] * ink || null); below.push(p[2] * ink || null, p[3] * ink || null);
      }
      z.push(zs); text.push(ts); dark.push(above, below);
    }
    const bar = { len: 0.55, y: 0, yanchor: "bottom", thickness: 12, tickvals: [-2, -1, 0, 1, 2], ticktext: ["≤ 0.01", "0.1", "1", "10", "≥ 100"], title: { text: "error / bound", side: "right" } };
    return [
      { type: "heatmap", z, text, hovertemplate: "%{text}<extra></extra>", zmin: -2, zmax: 2, colorscale: SCALE, colorbar: bar, xaxis: "x", yaxis: "y2" },
      { type: "heatmap", z: dark, x: [...Array(2 * r.width).keys()].map(half), y: [...Array(2 * r.steps).keys()].map(half), zmin: 1, zmax: 2, colorscale: [[0, "rgba(0,0,0,.42)"], [1, "#000"]], showscale: false, hoverinfo: "skip", xaxis: "x", yaxis: "y2" },
    ];
  }

  const cursor = () => [{ type: "rect", xref: "x", yref: "y2", x0: current.site - 0.5, x1: current.site + 0.5, y0: current.step - 0.5, y1: current.step + 0.5, line: { color: css("--front"), width: 3 } },
    { type: "line", xref: "x", yref: "y domain", x0: current.site, x1: current.site, y0: 0, y1: 1, line: { color: css("--dim"), width: 1 } }];

  function drawMap() {
    const r = run(), node = $(".chart-map", root());
    if (!plotly || !r.width) return;
    const heat = Math.max(120, Math.min(640, 26 * r.steps)), height = 300 + heat + 130, names = r.ticks.length === r.width;
    node.style.height = `${height}px`;
    r.heat ??= heatTraces(r);
    const share = heat / (height - 130);
    draw(node, [...depthTraces(r), ...r.heat], {
      height, shapes: cursor(), showlegend: true, legend: { orientation: "h", x: 0, y: 1.0, yanchor: "bottom" }, margin: { l: 58, r: 12, t: 30, b: names ? 120 : 60 },
      xaxis: { tickvals: r.ticks.map((t) => t[0]), ticktext: r.ticks.map((t) => t[1].replace(/^model\./, "")), tickangle: -50, range: [-0.5, r.width - 0.5], anchor: "y2" },
      yaxis: { type: "log", domain: [share + 0.04, 1], title: { text: `rel-L2, step ${current.step}` }, exponentformat: "power", nticks: 8 },
      yaxis2: { domain: [0, share], autorange: "reversed", title: { text: "step" }, dtick: steps(r.steps) },
      uirevision: current.run,
    });
    if (!node.dataset.bound) {
      node.dataset.bound = "1";
      node.on("plotly_click", (event) => { const p = event.points[0]; select(p.yaxis._id === "y2" ? Math.round(p.y) : current.step, Math.round(p.x)); });
    }
  }

  function drawKl() {
    const node = $(".chart-kl", root()), kl = run().kl;
    if (!plotly || !node || !kl.length) return;
    const x = kl.map((_, i) => i), line = (name, k, dash) => ({ name, x, y: kl.map((v) => plain(v[k])), type: "scatter", mode: "lines+markers", line: { dash } });
    draw(node, [line("mean", 0, "solid"), line("largest", 1, "dot")], { height: 220, showlegend: true, xaxis: { title: { text: "step" }, dtick: steps(kl.length) }, yaxis: { title: { text: "nats" }, rangemode: "tozero", exponentformat: "e" } });
  }

  // The panel of one result
  function panel() {
    const r = run(), box = $(".panel", root()), site = r.sites[current.site], i = at(), key = `${current.step}:${current.site}`, c = r.columns;
    box.replaceChildren();
    if (!site) { box.append(el("p", "Nothing was compared.", "dim")); return; }
    box.append(el("h3", `${site.site}, step ${current.step}`, "mono"));
    if (r.state[i] === MISSING) { box.append(el("p", "Not compared at this step.", "dim")); return; }
    const [metric, rule] = r.rules[r.rule_of[i]];
    const line = el("p");
    line.append(el("b", `${GLYPHS[r.state[i]]} ${NAMES[r.state[i]]}`), `: ${metric} ${num(c.value[i])}, bound ${num(c.bound[i])} (${rule}), ${num(c.margin[i])} x bound`);
    box.append(line, provenance(site));
    const d = r.details[key];
    if (!d) {
      const kept = Object.keys(r.details).filter((k) => k.endsWith(`:${current.site}`)).map((k) => +k.split(":")[0]).sort((a, b) => a - b);
      const p = el("p", `rel-L2 ${num(c.error[i])}, max abs ${num(c.max_abs[i])}. Details of this result were left out to keep the file small; this site has them at step `, "dim");
      kept.forEach((t, n) => { const a = el("a", String(t)); a.href = "#sites"; a.onclick = (e) => { e.preventDefault(); select(t, current.site); }; p.append(n ? ", " : "", a); });
      box.append(p);
      return;
    }
    const charts = el("div", "", "charts"), pending = [];
    box.append(charts);
    const add = (title, traces, extra) => { const outer = el("div"), node = el("div", "", "plot"); outer.append(el("h4", title), node); charts.append(outer); pending.push(() => draw(node, traces, { height: 260, ...extra })); };
    histogram(d, add);
    scatter(r, r.samples[key], add, charts);
    axes(d, add);
    worstElements(r.samples[key], d, site, box);
    box.append(el("h3", "All metrics"), numbers(d));
    if (plotly) for (const paint of pending) paint(); // only now do the columns have their widths
  }

  function provenance(site) {
    const table = el("table", "", "provenance"), rows = [["source", site.source], ["module", site.module_class], ["ONNX value, engine output", site.value], ["FX node", site.fx_node], ["dtype", site.dtype], ["dimensions", (site.axes || []).map((a) => a || "·").join(" x ")], ["the same tensor", (site.aliases || []).join(", ")]];
    for (const [name, value] of rows) if (value) { const tr = el("tr"); tr.append(el("th", name), el("td", value, "mono")); table.append(tr); }
    return table;
  }

  function histogram(d, add) {
    const bins = d.histogram.map(([edge, count]) => [edge, count]);
    const label = bins.map(([edge]) => (edge === 0 ? "0" : num(edge, 2)));
    add(`|difference| of ${d.count} elements`, [{ type: "bar", x: label, y: bins.map((b) => b[1]), marker: { color: css("--good") }, hovertemplate: "from %{x} to twice that: %{y} elements<extra></extra>" }],
      { xaxis: { type: "category", title: { text: "octave, from" }, nticks: 10 }, yaxis: { type: "log", title: { text: "elements" }, dtick: 1, tickformat: "d", range: [-0.3, Math.ceil(Math.log10(Math.max(1, ...bins.map((b) => b[1])))) + 0.05] } });
  }

  function scatter(r, s, add, charts) {
    if (!s) {
      const outer = el("div"); outer.append(el("h4", "engine against reference"), el("p", r.kept ? "No elements of this result were sampled; the worst step of each site has them." : "No tensors were kept, so there are no elements to show: pytest --ditto-dump-dir DIR keeps them.", "dim"));
      charts.append(outer); return;
    }
    const x = floats(s.reference), y = floats(s.engine), ends = [...x, ...y].filter(Number.isFinite), low = Math.min(...ends), high = Math.max(...ends);
    const title = x.length < s.count ? `engine against reference: ${x.length} of ${s.count} elements, drawn at random, and the ${s.worst.length} worst` : `engine against reference: all ${s.count} elements`;
    add(title, [
      { type: "scatter", mode: "lines", x: [low, high], y: [low, high], line: { color: css("--dim"), width: 1, dash: "dash" }, hoverinfo: "skip" },
      { type: "scatter", mode: "markers", x, y, marker: { size: 4, color: css("--good"), opacity: 0.6 }, hovertemplate: "reference %{x}<br>engine %{y}<extra></extra>" },
      { type: "scatter", mode: "markers", x: s.worst.map((w) => plain(w.reference)), y: s.worst.map((w) => plain(w.engine)), text: s.worst.map((w) => `[${w.index}]`), marker: { size: 9, symbol: "square-open", color: css("--bad"), line: { width: 2 } }, hovertemplate: "%{text}<br>reference %{x}<br>engine %{y}<extra></extra>" },
    ], { xaxis: { title: { text: "reference" }, nticks: 6 }, yaxis: { title: { text: "engine" } } });
  }

  function axes(d, add) {
    for (const [name, title] of [["by_position", "position"], ["by_row", "row"], ["by_head", "head"]]) {
      const values = d[name].map(plain), size = d[`${name}_bucket`];
      if (values.length < 2) continue;
      add(`rel-L2 by ${title}${size > 1 ? `, largest of each ${size}` : ""}`, [{ type: "bar", x: values.map((_, i) => i * size), y: logged(values), customdata: values.map((v) => num(v)), marker: { color: css("--good") }, hovertemplate: `${title} %{x}: %{customdata}<extra></extra>` }],
        { xaxis: { title: { text: title }, tickformat: "d", dtick: steps(values.length * size) }, yaxis: { type: "log", exponentformat: "power", nticks: 6, range: wide(logged(values)) } });
    }
  }

  function worstElements(s, d, site, box) {
    box.append(el("h3", "Worst elements"));
    const rows = s ? s.worst : d.max_abs_index ? [{ index: d.max_abs_index, engine: d.max_abs_actual, reference: d.max_abs_expected }] : [];
    if (!rows.length) { box.append(el("p", "Every element is the same on both sides.", "dim")); return; }
    const table = el("table", "", "elements"), head = el("tr"), dims = (site.axes || []).some(Boolean) ? ` (${site.axes.map((a) => a || "·").join(", ")})` : "";
    for (const name of [`index${dims}`, "engine", "reference", "difference"]) head.append(el("th", name));
    table.append(head);
    for (const row of rows) {
      const tr = el("tr"), a = plain(row.engine), b = plain(row.reference);
      for (const text of [`[${row.index.join(", ")}]`, num(a, 6), num(b, 6), num(a - b)]) tr.append(el("td", text, "mono"));
      table.append(tr);
    }
    box.append(table);
    if (!s) box.append(el("p", "Only the largest difference is known: no tensors were kept.", "dim"));
  }

  function numbers(d) {
    const box = el("div", "", "numbers");
    for (const [name, value] of Object.entries(d)) {
      if (Array.isArray(value) && /^(by_|histogram)/.test(name) || /_bucket$/.test(name)) continue;
      const row = el("div"); row.append(el("span", name), el("b", Array.isArray(value) ? `[${value.flat().join(", ")}]` : num(plain(value), 4))); box.append(row);
    }
    return box;
  }

  // The list of sites
  function list() {
    const r = run(), box = $(".list", root()), query = $(".search", root()).value.toLowerCase().split(/\s+/).filter(Boolean), failing = $(".failing", root()).checked;
    r.shown = r.sites.map((_, i) => i).filter((i) => query.every((q) => r.text[i].includes(q)) && (!failing || r.worst[i] >= 0 && r.state[r.worst[i]] >= DIVERGED));
    $(".found", root()).textContent = `${r.shown.length} of ${r.width} sites, in the order of the computation; error / bound at the worst step`;
    box.replaceChildren(...r.shown.map((i) => {
      const li = el("li"), w = r.worst[i]; li.dataset.site = i; li.id = `run${current.run}-site${i}`; li.setAttribute("role", "option");
      li.append(el("span", w < 0 ? " " : GLYPHS[r.state[w]], "glyph"), el("span", r.sites[i].site, "mono"), el("span", w < 0 ? "" : num(r.columns.margin[w], 2), "dim"));
      li.title = `${r.sites[i].site}: ${w < 0 ? NAMES[0] : NAMES[r.state[w]]}`;
      return li;
    }));
    highlight();
  }

  function highlight() {
    const box = $(".list", root());
    for (const li of box.children) li.setAttribute("aria-selected", String(+li.dataset.site === current.site));
    const chosen = $(`[data-site="${current.site}"]`, box);
    if (!chosen) return;
    box.setAttribute("aria-activedescendant", chosen.id);
    if (chosen.offsetTop < box.scrollTop + box.offsetTop || chosen.offsetTop > box.scrollTop + box.offsetTop + box.clientHeight - 24) box.scrollTop = chosen.offsetTop - box.offsetTop - box.clientHeight / 2;
  }

  function select(step, site) {
    const r = run();
    current.step = Math.max(0, Math.min(r.steps - 1, step)); current.site = Math.max(0, Math.min(r.width - 1, site));
    history.replaceState(null, "", `#run=${current.run}&step=${current.step}&site=${encodeURIComponent((r.sites[current.site] || {}).site || "")}`);
    highlight(); panel(); drawMap();
  }

  function move(by) {
    const shown = run().shown, here = shown.indexOf(current.site);
    if (shown.length) select(current.step, shown[Math.max(0, Math.min(shown.length - 1, here < 0 ? 0 : here + by))]);
  }

  function jump(by) {
    const r = run(), size = r.state.length;
    for (let k = 1; k <= size; k++) { const i = (at() + by * k + size * 2) % size; if (r.state[i] >= DIVERGED) { select(Math.floor(i / r.width), i % r.width); return; } }
  }

  function show(number) {
    current.run = number;
    for (const main of $$("main.run")) main.hidden = +main.dataset.run !== number;
    [current.step, current.site] = run().start;
    list(); drawKl(); select(current.step, current.site);
  }

  function restore(hash) {
    const given = new URLSearchParams(hash.slice(1));
    if (!given.has("run") || !runs[+given.get("run")]) return;
    if (+given.get("run") !== current.run) show(+given.get("run"));
    if ($("#runs")) $("#runs").value = String(current.run);
    const site = run().sites.findIndex((s) => s.site === given.get("site"));
    if (site >= 0) select(+given.get("step"), site);
  }

  // Themes
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  function theme(name) { document.documentElement.dataset.theme = name || forced || (wanted.matches ? "dark" : "light"); }
  function redraw() { if (runs.length) { drawMap(); drawKl(); panel(); } }
  function toggle() { forced = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; theme(); redraw(); }
  wanted.addEventListener("change", () => { theme(); redraw(); });
  addEventListener("beforeprint", () => { theme("light"); redraw(); });
  addEventListener("afterprint", () => { theme(); redraw(); });
  theme();

  const KEYS = { j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1), l: () => select(current.step + 1, current.site), ArrowRight: () => select(current.step + 1, current.site), h: () => select(current.step - 1, current.site), ArrowLeft: () => select(current.step - 1, current.site), n: () => jump(1), p: () => jump(-1), f: () => select(...run().start), "/": () => $(".search", root()).focus(), t: toggle, "?": () => $("#help").showModal() };

  function listen() {
    document.addEventListener("keydown", (event) => {
      const typing = event.target.matches("input, select, textarea"), inList = event.target.matches(".list, body");
      if (typing && event.key === "Escape") event.target.blur();
      if (typing && event.target.matches(".search") && event.key === "Enter") { move(0); $(".list", root()).focus(); event.preventDefault(); }
      if (typing || event.ctrlKey || event.metaKey || event.altKey || $("#help").open || !(event.key in KEYS) || event.key.startsWith("Arrow") && !event.target.matches(".list")) return;
      if (inList || event.key.length === 1) { event.preventDefault(); KEYS[event.key](); }
    });
    $("#theme").onclick = toggle;
    $("#help-button").onclick = () => $("#help").showModal();
    if ($("#runs")) $("#runs").onchange = (event) => show(+event.target.value);
    for (const a of $$("header nav a")) a.onclick = (event) => { event.preventDefault(); $(`section.${a.getAttribute("href").slice(1)}`, root()).scrollIntoView(); };
    for (const main of $$("main.run")) {
      $(".search", main).oninput = list;
      $(".failing", main).onchange = list;
      $(".list", main).onclick = (event) => { const li = event.target.closest("li"); if (li) select(run().worst[+li.dataset.site] >= 0 && run().state[at(current.step, +li.dataset.site)] === MISSING ? Math.floor(run().worst[+li.dataset.site] / run().width) : current.step, +li.dataset.site); };
      for (const a of $$(".goto", main)) a.onclick = (event) => { event.preventDefault(); select(+a.dataset.step, run().sites.findIndex((s) => s.site === a.dataset.site)); $("section.sites", main).scrollIntoView(); };
    }
  }

  async function library() {
    const script = document.createElement("script"), url = URL.createObjectURL(await unpacked("#plotly").blob());
    await new Promise((done, failed) => { script.onload = done; script.onerror = failed; script.src = url; document.head.append(script); });
    URL.revokeObjectURL(url);
    plotly = window.Plotly;
    performance.mark("loaded");
  }

  async function open() {
    const hash = location.hash, loaded = library(); // unpacked while the page gets ready
    runs = (await unpacked("#payload").json()).map(prepare);
    listen();
    show(0); restore(hash);
    document.body.dataset.state = "readable";
    performance.mark("readable");
    await loaded;
    redraw();
    document.body.dataset.state = "drawn";
    performance.mark("drawn");
  }
  // Text first: the library takes longer to start than the rest of the page.
  requestAnimationFrame(() => setTimeout(open));
})();

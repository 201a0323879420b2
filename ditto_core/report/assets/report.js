"use strict";
(() => {
  const [MISSING, WITHIN, EXPLAINED, HEALED, DIVERGED, NONFINITE, UNJUDGED] = [0, 1, 2, 3, 4, 5, 6];
  const NAMES = ["not compared", "within", "explained", "recovered", "diverged", "not finite", "not judged"];
  const GLYPHS = [" ", "✓", "≈", "○", "✗", "!", "?"];
  // Which quarters of a cell are dark: a state shows without its colour.
  const PATTERNS = { [EXPLAINED]: [1, 0, 1, 0], [HEALED]: [1, 1, 0, 0], [DIVERGED]: [1, 0, 0, 1], [NONFINITE]: [1, 1, 1, 1], [UNJUDGED]: [0, 1, 1, 1] };
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const fails = (state) => state === DIVERGED || state === NONFINITE;
  const current = { run: 0, site: 0, step: 0 };
  let runs = [], forced = "";

  function bytes(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const raw = atob(text), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out;
  }
  const floats = (text) => new Float32Array(bytes(text).buffer);
  const unpacked = (id) => new Response(new Blob([bytes($(id).textContent)]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
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
  const rank = (run, at) => (fails(run.state[at]) ? 1e6 : 0) + Math.min(run.columns.margin[at], 1e5);
  const run = () => runs[current.run];
  const root = () => $(`main[data-run="${current.run}"]`);
  const at = (step = current.step, site = current.site) => step * run().width + site;

  // Overview charts
  const { css, heat, logged, num, plot } = Charts;
  const whole = (u, low, high) => (low === u.data[0][0] && high === u.data[0].at(-1) ? [low - 0.5, high + 0.5] : [low, high]);

  function drawDepth() {
    const r = run(), node = $(".chart-depth", root()), step = current.step, x = r.sites.map((_, i) => i);
    if (!r.width) return;
    const { error, bound, floor, local, value } = r.columns;
    const pick = (column, fits = () => true) => x.map((i) => (r.state[at(step, i)] === MISSING || Number.isNaN(column[at(step, i)]) || !fits(at(step, i)) ? null : column[at(step, i)]));
    // A bound on another metric than rel-L2 has no place on this axis.
    const raw = { floor: pick(floor), bound: pick(bound, (i) => error[i] === value[i] && Number.isFinite(bound[i])), error: pick(error), local: pick(local) };
    const all = Object.values(raw).flat(), measured = raw.local.some((v) => v !== null), y = (name) => logged(raw[name], all);
    plot(node, {
      height: 250, log: true, bare: true, xrange: whole, view: r.view, legend: $(".depth-legend", root()), x: "site", y: `rel-L2 at step ${step}`, full: (i) => r.sites[i].site,
      data: [x, y("floor"), y("bound"), y("error"), ...(measured ? [y("local")] : [])],
      series: [
        { label: "noise floor", color: "--dim", dash: [2, 4], width: 2, raw: raw.floor },
        { label: "bound", color: "--good", dash: [8, 5], raw: raw.bound },
        { label: "error", color: "--front", raw: raw.error },
        ...(measured ? [{ label: "local error", color: "--mark", dots: "open", size: 6, raw: raw.local }] : []),
      ],
      marks: (u) => marks(u, r, y("error")),
      zoomed: (low, high) => { if (r.view?.[0] !== low || r.view?.[1] !== high) { r.view = [low, high]; $(".chart-map", root()).redraw?.(); } },
      ready: (u) => { u.over.onclick = () => { if (u.cursor.idx !== null) select(current.step, u.cursor.idx); }; },
    });
  }

  function marks(u, r, y) {
    const pen = u.ctx, ratio = Charts.FINE, shape = { [HEALED]: "□", [DIVERGED]: "✕", [NONFINITE]: "✱" };
    pen.save();
    pen.beginPath(); pen.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height); pen.clip();
    pen.textAlign = "center"; pen.textBaseline = "middle"; pen.font = `bold ${12 * ratio}px system-ui, sans-serif`;
    y.forEach((v, i) => {
      if (v === null) return;
      const px = u.valToPos(i, "x", true), py = u.valToPos(v, "y", true), sign = shape[r.state[at(current.step, i)]];
      pen.fillStyle = css(sign ? "--bad" : "--front");
      if (sign) pen.fillText(sign, px, py);
      else if (r.width < 150) { pen.beginPath(); pen.arc(px, py, 2.2 * ratio, 0, 7); pen.fill(); }
    });
    const here = u.valToPos(current.site, "x", true);
    pen.strokeStyle = css("--dim"); pen.lineWidth = ratio; pen.beginPath(); pen.moveTo(here, u.bbox.top); pen.lineTo(here, u.bbox.top + u.bbox.height); pen.stroke();
    pen.restore();
  }

  function drawMap() {
    const r = run(), node = $(".chart-map", root());
    if (!r.width) return;
    const names = r.ticks.length === r.width, longest = Math.max(...r.ticks.map((t) => short(t[1]).length));
    const spec = {
      sites: r.width, steps: r.steps, rowHeight: Math.max(8, Math.min(26, 640 / r.steps)), below: 16 + longest * (names ? 4.6 : 5), ticks: r.ticks.map(([i, name]) => [i, short(name)]),
      view: () => r.view || [-0.5, r.width - 0.5],
      cell: (t, s) => {
        const i = at(t, s), m = r.columns.margin[i], state = r.state[i];
        return state === MISSING ? null : { level: Math.max(-2, Math.min(2, Number.isNaN(m) ? 2 : Math.log10(m))), inked: PATTERNS[state], black: state === NONFINITE };
      },
      ready: () => cursor(node),
    };
    heat(node, spec);
    const tip = $(".tip", node);
    node.onmousemove = (event) => {
      const found = Charts.cellAt(node, event, spec);
      tip.hidden = !found;
      if (!found) return;
      const i = at(...found);
      tip.textContent = `${r.sites[found[1]].site}\nstep ${found[0]}: ${NAMES[r.state[i]]}, ${num(r.columns.margin[i])} x bound`;
      const box = node.getBoundingClientRect(), x = event.clientX - box.left;
      tip.style.top = `${event.clientY - box.top + 14}px`;
      tip.style.left = `${Math.min(x + 12, box.width - tip.offsetWidth - 4)}px`;
    };
    node.onmouseleave = () => { tip.hidden = true; };
    node.onclick = (event) => { const found = Charts.cellAt(node, event, spec); if (found) select(...found); };
  }

  const short = (name) => name.replace(/^model\./, "");

  function cursor(node) {
    const frame = $(".cursor", node), { left, top, step, row, inner } = node.place || {};
    frame.hidden = !left || left(current.site) < Charts.LEFT - 1 || left(current.site) + step > Charts.LEFT + inner + 1;
    if (frame.hidden) return;
    Object.assign(frame.style, { left: `${left(current.site) - 2}px`, top: `${top(current.step) - 2}px`, width: `${step + 4}px`, height: `${row + 4}px` });
  }

  function drawKl() {
    const node = $(".chart-kl", root()), kl = run().kl;
    if (!node) return;
    const column = (k) => kl.map((v) => { const found = plain(v[k]); return Number.isFinite(found) ? found : null; });
    plot(node, {
      height: 200, x: "step", y: "nats", xrange: whole, yrange: (u, low, high) => [0, high > 0 ? high * 1.1 : 1], data: [kl.map((v) => v[0]), column(1), column(2)],
      series: [{ label: "mean", color: "--front" }, { label: "largest", color: "--mark", dash: [2, 4] }, ].map((one) => ({ ...one, spots: true })),
    });
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
    if (!Number.isNaN(c.local[i])) line.append(`; adds ${num(c.local[i])} itself`);
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
    const add = (title, spec) => { const outer = el("div"), node = el("div", "", "plot"); outer.append(el("h4", title), node); charts.append(outer); pending.push(() => plot(node, spec)); };
    histogram(d, add);
    scatter(r, r.samples[key], add, charts);
    axes(d, add);
    worstElements(r.samples[key], d, site, box);
    box.append(el("h3", "All metrics"), numbers(d));
    for (const paint of pending) paint(); // only now do the columns have their widths
  }

  function provenance(site) {
    const table = el("table", "", "provenance"), rows = [["source", site.source], ["module", site.module_class], ["ONNX value, engine output", site.value], ["FX node", site.fx_node], ["dtype", site.dtype], ["dimensions", (site.axes || []).map((a) => a || "·").join(" x ")], ["the same tensor", (site.aliases || []).join(", ")]];
    for (const [name, value] of rows) if (value) { const tr = el("tr"); tr.append(el("th", name), el("td", value, "mono")); table.append(tr); }
    return table;
  }

  function histogram(d, add) {
    const edges = d.histogram.map(([edge]) => (edge === 0 ? "0" : num(edge, 2))), counts = d.histogram.map((b) => b[1]);
    add(`|difference| of ${d.count} elements`, {
      log: true, x: "octave, from", y: "elements", xrange: whole, name: (i) => edges[i] ?? "", data: [edges.map((_, i) => i), logged(counts)],
      series: [{ label: "elements", color: "--good", bars: true, raw: counts }],
    });
  }

  function scatter(r, s, add, charts) {
    if (!s) {
      const outer = el("div"); outer.append(el("h4", "engine against reference"), el("p", r.kept ? "No elements of this result were sampled; the worst step of each site has them." : "No tensors were kept, so there are no elements to show: pytest --ditto-dump-dir DIR keeps them.", "dim"));
      charts.append(outer); return;
    }
    const x = floats(s.reference), y = floats(s.engine), sampled = [...x].map((v, i) => [v, y[i], null]), worst = s.worst.map((w) => [plain(w.reference), null, plain(w.engine)]);
    const drawn = [...sampled, ...worst].filter(([a, b, c]) => Number.isFinite(a) && Number.isFinite(b ?? c)).sort((a, b) => a[0] - b[0]), hidden = x.length + worst.length - drawn.length;
    const title = x.length < s.count ? `engine against reference: ${x.length} of ${s.count} elements, drawn at random, and the ${s.worst.length} worst` : `engine against reference: all ${s.count} elements`;
    const padded = (u, low, high) => { const pad = (high - low) / 20 || 1; return [low - pad, high + pad]; };
    add(title + (hidden ? `; ${hidden} that are not finite have no place here` : ""), {
      real: true, x: "reference", y: "engine", xrange: padded, yrange: padded, data: [drawn.map((p) => p[0]), drawn.map((p) => p[0]), drawn.map((p) => p[1]), drawn.map((p) => p[2])],
      series: [{ label: "equal", color: "--dim", dash: [6, 4], width: 1 }, { label: "engine", color: "--good", dots: "full", size: 4 }, { label: "worst", color: "--bad", dots: "open", size: 10 }],
    });
  }

  function axes(d, add) {
    for (const [name, title] of [["by_position", "position"], ["by_row", "row"], ["by_head", "head"]]) {
      const values = d[name].map(plain), size = d[`${name}_bucket`];
      if (values.length < 2) continue;
      add(`rel-L2 by ${title}${size > 1 ? `, largest of each ${size}` : ""}`, {
        log: true, x: title, y: "rel-L2", xrange: whole, name: (i) => (i < values.length ? i * size : ""), data: [values.map((_, i) => i), logged(values)],
        series: [{ label: "rel-L2", color: "--good", bars: true, raw: values }],
      });
    }
  }

  function worstElements(s, d, site, box) {
    box.append(el("h3", "Worst elements"));
    const rows = s ? s.worst : known(d);
    if (!rows.length) { box.append(el("p", "Every element is the same on both sides.", "dim")); return; }
    const table = el("table", "", "elements"), head = el("tr"), dims = (site.axes || []).some(Boolean) ? ` (${site.axes.map((a) => a || "·").join(", ")})` : "";
    for (const name of [`index${dims}`, "engine", "reference", "difference"]) head.append(el("th", name));
    table.append(head);
    for (const row of rows) {
      const tr = el("tr");
      for (const text of [`[${row.index.join(", ")}]`, num(plain(row.engine), 8), num(plain(row.reference), 8), num(plain(row.difference))]) tr.append(el("td", text, "mono"));
      table.append(tr);
    }
    box.append(table);
    if (!s) box.append(el("p", "Only what the metrics name is known: no tensors were kept.", "dim"));
  }

  // Elements that the metrics alone name: the first that is not finite, and the largest difference.
  function known(d) {
    const found = [];
    if (d.first_nonfinite) found.push({ index: d.first_nonfinite[0], engine: d.first_nonfinite[1] === "actual" ? "not finite" : "–", reference: d.first_nonfinite[1] === "actual" ? "–" : "not finite", difference: "–" });
    if (d.max_abs_index && plain(d.max_abs) !== 0) found.push({ index: d.max_abs_index, engine: d.max_abs_actual, reference: d.max_abs_expected, difference: plain(d.max_abs_actual) < plain(d.max_abs_expected) ? -d.max_abs : d.max_abs });
    return found;
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
    r.shown = r.sites.map((_, i) => i).filter((i) => query.every((q) => r.text[i].includes(q)) && (!failing || r.worst[i] >= 0 && fails(r.state[r.worst[i]])));
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
    highlight(); panel(); drawDepth(); cursor($(".chart-map", root()));
  }

  function move(by) {
    const shown = run().shown, here = shown.indexOf(current.site);
    if (shown.length) select(current.step, shown[Math.max(0, Math.min(shown.length - 1, here < 0 ? 0 : here + by))]);
  }

  function jump(by) {
    const r = run(), size = r.state.length;
    for (let k = 1; k <= size; k++) { const i = (at() + by * k + size * 2) % size; if (fails(r.state[i])) { select(Math.floor(i / r.width), i % r.width); return; } }
  }

  function show(number) {
    current.run = number;
    for (const main of $$("main.run")) main.hidden = +main.dataset.run !== number;
    [current.step, current.site] = run().start;
    list(); select(current.step, current.site); drawMap(); drawKl();
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
  const redraw = () => { if (runs.length) for (const node of $$(".chart, .plot", root())) node.redraw?.(); };
  function toggle() { forced = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; theme(); redraw(); }
  wanted.addEventListener("change", () => { theme(); redraw(); });
  // Charts are pictures: for paper they are drawn anew, as wide as a page.
  addEventListener("beforeprint", () => { theme("light"); document.body.classList.add("printing"); redraw(); });
  addEventListener("afterprint", () => { theme(); document.body.classList.remove("printing"); redraw(); });
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

  async function open() {
    const hash = location.hash;
    runs = (await unpacked("#payload")).map(prepare);
    performance.mark("readable");
    listen();
    show(0); restore(hash);
    requestAnimationFrame(() => setTimeout(() => { // the frame with the charts is on the screen
      performance.mark("drawn");
      document.body.dataset.state = "drawn";
    }));
  }
  requestAnimationFrame(() => setTimeout(open)); // the text is shown before anything is drawn
})();

"use strict";
// Charts by uPlot, and a heat map on a canvas, which uPlot has none of. A chart is drawn into a node and drawn again when
// the node's width or the theme changes; colours are names of the style sheet's variables.
const Charts = (() => {
  const LEFT = 74, RIGHT = 14; // of every chart, so that the error along the depth stands over its cells
  const FONT = "11px system-ui, sans-serif";
  const FINE = Math.max(2, devicePixelRatio); // for print; the page gives uPlot the same
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const power = (v) => `10${[...String(Math.round(Math.log10(v)))].map((c) => SUPERSCRIPT[c]).join("")}`;

  function num(v, digits = 3) {
    if (v === null || v === undefined || Number.isNaN(v)) return "–";
    if (typeof v !== "number") return String(v);
    if (!Number.isFinite(v)) return v > 0 ? "inf" : "-inf";
    const size = Math.abs(v);
    if (v === 0 || (Number.isInteger(v) && size < 1e7)) return String(v);
    if (size >= 1e5 || size < 1e-3) return v.toExponential(digits - 1);
    return size >= 10 ** digits ? String(Math.round(v)) : v.toPrecision(digits + 1);
  }

  function powers(u, axis, low, high) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first + 1) / 7)), found = [];
    for (let e = first; e <= last; e += every) found.push(10 ** e);
    return found;
  }

  // Where a logarithmic axis cannot show a number it stands at the axis' end; what is written of it is the number.
  function logged(values, all = values) {
    const finite = all.filter((v) => v > 0 && Number.isFinite(v));
    const high = finite.length ? Math.max(...finite) * 3 : 1, low = Math.max(high * 1e-14, finite.length ? Math.min(...finite) / 3 : 1e-9);
    return values.map((v) => (v === null || v === undefined ? null : Number.isFinite(v) ? Math.max(v, low) : high));
  }

  const decades = (u, low, high) =>
    low > 0 ? [10 ** Math.floor(Math.log10(low) - 1e-9), 10 ** Math.ceil(Math.log10(high) + 1e-9)] : [1e-9, 1];

  function axis(label, more) {
    const grid = { stroke: css("--line"), width: 1 }, front = css("--front");
    return { label, labelSize: 18, size: 36, labelGap: 0, font: FONT, labelFont: FONT, stroke: front, grid, ticks: grid, ...more };
  }

  function options(spec, width) {
    const whole = { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] };
    const y = spec.log ? { splits: powers, filter: (u, found) => found, values: (u, found) => found.map(power) }
      : { values: (u, found) => found.map((v) => num(v, 2)) };
    const x = spec.real ? { values: (u, found) => found.map((v) => num(v, 2)) }
      : { ...whole, values: (u, found) => found.map((v) => (Number.isInteger(v) ? spec.name?.(v) ?? v : "")) };
    return {
      width, height: spec.height || 240, padding: [8, RIGHT, 0, 0], pxAlign: false,
      scales: { x: { time: false, range: spec.xrange }, y: spec.log ? { distr: 3, range: decades } : { range: spec.yrange } },
      axes: [
        axis(spec.x, { ...x, ...(spec.bare && { values: (u, found) => found.map(() => ""), label: "", size: 6 }) }),
        axis(spec.y, { ...y, size: LEFT - 18 }),
      ],
      series: [
        { label: spec.x, value: (u, v) => (v === null || v === undefined ? "–" : spec.real ? num(v) : spec.full?.(v) ?? spec.name?.(v) ?? v) },
        ...spec.series.map((one) => series(one)),
      ],
      legend: { show: !spec.silent, markers: { width: 2, dash: (u, s) => (u.series[s].dash ? "dashed" : "solid") }, ...(spec.legend && { mount: (u, table) => spec.legend.replaceChildren(table) }) },
      cursor: { y: false, points: { size: 8 }, drag: { x: true, y: false } },
      hooks: { draw: spec.marks ? [spec.marks] : [], setScale: spec.zoomed ? [(u, key) => key === "x" && spec.zoomed(u.scales.x.min, u.scales.x.max)] : [] },
    };
  }

  function series({ label, color, raw, dash, bars, dots, spots = false, width = 1.5, size = 5 }) {
    const stroke = css(color);
    const shown = { label, stroke, dash: dash?.map((v) => v * FINE), width, value: (u, v, s, i) => num(i === null || i === undefined ? null : raw ? raw[i] : v) };
    if (bars) return { ...shown, fill: stroke, width: 0, paths: uPlot.paths.bars({ size: [0.86, 40] }), points: { show: false } };
    if (dots) return { ...shown, paths: () => null, points: { show: true, size, space: 0, stroke, width: 1.2, fill: dots === "full" ? stroke : "transparent" } };
    return { ...shown, points: { show: spots, size: 5, fill: stroke } };
  }

  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.clientWidth && target.clientWidth !== target.drawnAt) target.redraw();
  });

  function keep(node, draw) {
    node.redraw = () => { node.drawnAt = node.clientWidth; if (node.clientWidth) draw(); };
    watcher.observe(node);
    node.redraw();
  }

  function plot(node, spec) {
    keep(node, () => {
      const made = new uPlot(options(spec, node.clientWidth), spec.data, (u, ready) => { node.chart?.destroy(); node.append(u.root); ready(); });
      node.chart = made;
      if (spec.view) made.setScale("x", { min: spec.view[0], max: spec.view[1] });
      spec.ready?.(made);
    });
  }

  const SCALE = [[0, 8, 81, 156], [0.25, 67, 147, 195], [0.4999, 209, 229, 240], [0.5, 254, 224, 182], [0.75, 224, 130, 20], [1, 127, 59, 8]];
  const color = (share) => {
    const k = SCALE.findIndex(([end]) => share <= end), [b, ...high] = SCALE[k], [a, ...low] = SCALE[Math.max(0, k - 1)];
    return `rgb(${high.map((h, i) => Math.round(b > a ? low[i] + ((h - low[i]) * (share - a)) / (b - a) : h))})`;
  };
  const COLORS = [...Array(201).keys()].map((k) => color(k / 200));

  // A heat map of log10(value) from -2 to 2. `cell(step, site)` gives a colour's number and which quarters are inked.
  function heat(node, spec) {
    keep(node, () => {
      const canvas = node.querySelector("canvas") || node.appendChild(document.createElement("canvas"));
      const width = node.clientWidth, inner = width - LEFT - RIGHT, row = spec.rowHeight, height = row * spec.steps;
      const pen = resized(canvas, width, height + spec.below);
      const [from, to] = spec.view(), step = inner / (to - from);
      const place = { left: (site) => LEFT + (site - 0.5 - from) * step, top: (t) => t * row, step, row, inner, height };
      node.place = place;
      pen.save();
      pen.beginPath(); pen.rect(LEFT, 0, inner, height); pen.clip();
      for (let s = Math.max(0, Math.floor(from)); s < Math.min(spec.sites, to + 1); s++) for (let t = 0; t < spec.steps; t++) cell(pen, place, s, t, spec.cell(t, s));
      pen.restore();
      labels(pen, spec, place);
      spec.ready?.();
    });
  }

  function resized(canvas, width, height) {
    canvas.width = Math.round(width * FINE); canvas.height = Math.round(height * FINE);
    canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(FINE, FINE);
    return pen;
  }

  const snapped = (v) => Math.round(v * FINE) / FINE;
  function cell(pen, place, s, t, found) {
    if (!found) return;
    const [left, middle, right] = [0, 0.5, 1].map((k) => snapped(place.left(s) + k * place.step));
    const [top, centre, bottom] = [0, 0.5, 1].map((k) => snapped(place.top(t) + k * place.row));
    pen.fillStyle = COLORS[Math.round(50 * (found.level + 2))];
    pen.fillRect(left, top, right - left, bottom - top);
    if (!found.inked) return;
    pen.fillStyle = found.black ? "#000" : "rgba(0,0,0,.5)";
    found.inked.forEach((inked, q) => {
      const [x, w] = q % 2 ? [middle, right - middle] : [left, middle - left], [y, h] = q < 2 ? [top, centre - top] : [centre, bottom - centre];
      if (inked) pen.fillRect(x, y, w, h);
    });
  }

  function labels(pen, spec, place) {
    pen.fillStyle = css("--front"); pen.strokeStyle = css("--line"); pen.font = FONT; pen.textBaseline = "middle"; pen.textAlign = "right";
    pen.strokeRect(LEFT, 0, place.inner, place.height);
    const every = Math.max(1, Math.ceil(14 / place.row));
    for (let t = 0; t < spec.steps; t += every * (every > 2 ? 2 : 1)) pen.fillText(String(t), LEFT - 6, place.top(t) + place.row / 2);
    pen.save(); pen.translate(11, place.height / 2); pen.rotate(-Math.PI / 2); pen.textAlign = "center"; pen.fillText("step", 0, 0); pen.restore();
    let last = -1e9;
    for (const [site, name] of spec.ticks) {
      const x = place.left(site) + place.step / 2;
      if (x < LEFT || x > LEFT + place.inner || x - last < 13) continue;
      last = x;
      pen.beginPath(); pen.moveTo(x, place.height); pen.lineTo(x, place.height + 4); pen.stroke();
      pen.save(); pen.translate(x + 3, place.height + 8); pen.rotate(-Math.PI / 4); pen.fillText(name, 0, 0); pen.restore();
    }
  }

  // The cell under a pointer, or null.
  function cellAt(node, event, spec) {
    const box = node.getBoundingClientRect(), { step, row, inner, height } = node.place;
    const x = event.clientX - box.left - LEFT, y = event.clientY - box.top;
    if (x < 0 || x >= inner || y < 0 || y >= height) return null;
    const site = Math.round(spec.view()[0] + x / step), t = Math.floor(y / row);
    return site >= 0 && site < spec.sites && t < spec.steps ? [t, site] : null;
  }

  return { FINE, LEFT, cellAt, css, heat, logged, num, plot };
})();

// Curves over steps: their rules, and their pictures with a shared zoom and cursor.
// Rules of curves. Values are by step, null where there is none.
const least = v => v.reduce((a, b) => Math.min(a, b), Infinity), most = v => v.reduce((a, b) => Math.max(a, b), -Infinity);
const sum = v => v.reduce((a, b) => a + b, 0), sorted = v => [...v].sort((a, b) => a - b), quantile = (v, q) => v[Math.floor(q * (v.length - 1))];
const constant = y => { const v = y.filter(known); return most(v) - least(v) <= 1e-6 * most(v.map(Math.abs)); };
const equal = (a, b) => a.every((x, i) => x === b[i] || known(x) && known(b[i]) && Math.abs(x - b[i]) <= 1e-4 * Math.abs(x));
// Decades: nearly all values are above 0, the largest 30 times their median, or 95 % of them 100 times the lowest 5 %.
function spansDecades(v) {
  const up = sorted(v.filter(x => x > 0));
  const most_up = up.length > 0 && up.length >= .95 * v.length && !v.some(x => x < 0);
  return most_up && (up.at(-1) > 30 * quantile(up, .5) || quantile(up, .95) > 100 * quantile(up, .05));
}
// A curve without noise (a schedule, the peak of memory) has small second differences, and is drawn as it is.
function noisy(y) {
  const v = y.filter(known), all = sorted(v), bends = sorted(v.slice(2).map((x, i) => Math.abs(x - 2 * v[i + 1] + v[i])));
  return quantile(bends, .5) > .002 * (quantile(all, .95) - quantile(all, .05));
}
// Of the n values around each place, or 50 to 99 of them, the mean of the middle 40 %: no lag, and a spike does not become a plateau.
const smoothed = (y, places, n, each = Math.max(1, Math.floor(n / 50))) => places.map(i => {
  const start = Math.max(0, i - (n >> 1)), v = sorted(y.slice(start, i + (n >> 1) + 1).filter((x, k) => known(x) && (i - start - k) % each === 0));
  const off = Math.floor(.3 * v.length), middle = v.slice(off, v.length - off);
  return known(y[i]) ? sum(middle) / middle.length : null;
});
// Of many places the least and the largest value of each of 500 parts.
function thin(y, places) {
  const size = Math.ceil(places.length / 500), kept = [];
  for (let k = 0; size > 2 && k < places.length; k += size) {
    const part = sorted(places.slice(k, k + size).filter(i => known(y[i]))), ends = part.toSorted((a, b) => y[a] - y[b]);
    if (part.length) kept.push(...sorted(new Set([ends[0], ends.at(-1)])));
  }
  return size > 2 ? kept : places;
}
// Places of values far from the smooth curve: 8 times the median distance, and 15 % of the axis.
function outliers(y, smooth, { at, low, high }) {
  const far = y.map((x, i) => known(x) ? Math.abs(at(x) - at(smooth[i])) : 0), limit = Math.max(8 * quantile(sorted(far), .5), .15 * (high - low));
  return far.flatMap((d, i) => d > limit ? [i] : []);
}
function nice(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw)), ticks = [];
  const step = [1, 2, 2.5, 5, 10].find(m => m * power >= raw * .999) * power;
  for (let k = Math.ceil(low / step - 1e-6); k * step <= high + step * 1e-6; k++) ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}
// The axis of values. Shares: from 0. Log: in half decades, where the smallest few may lie on the axis. Else little change fills little of the picture.
function axis(v, unit, log) {
  let low = least(v), high = most(v);
  if (!v.length) return { low: 0, high: 1, ticks: [0, 1], at: x => x };
  if (log) {
    const up = sorted(v.filter(x => x > 0)), a = Math.floor(2 * Math.log10(Math.max(up[0], quantile(up, .02) / 10)) + .02) / 2;
    const b = Math.max(a + 1, Math.ceil(2 * Math.log10(up.at(-1)) - .02) / 2), ticks = [];
    for (let k = Math.ceil(a); k <= b; k += Math.ceil((b - a) / 6)) ticks.push(10 ** k);
    return { low: a, high: b, ticks, at: x => x > 0 ? Math.max(a, Math.log10(x)) : a };
  }
  if (unit === "%") [low, high] = [Math.min(0, low), high > 1 ? high : high > .6 ? 1 : Math.max(1.06 * high, .02)];
  else {
    const span = .1 * Math.max(Math.abs(low), Math.abs(high)) || 1, middle = (low + high) / 2;
    if (high - low < span) [low, high] = [middle - span / 2, middle + span / 2];
    if (low > 0 && low < .5 * high) low = 0;
    const room = .05 * (high - low);
    [low, high] = [low && low - room, high + room];
  }
  return { low, high, ticks: nice(low, high, 4), at: x => x };
}
// End of the rules.

// Pictures: section, title, unit ("%": shares), metrics, where "*" stands for any ending. Those without a section are not drawn.
// Metrics in none of them are the user's, or a loss's: each has a picture below these, or is in the one that it is registered for.
const CHARTS = [
  ["Learning", "Accuracy", "%", "accuracy"], ["Learning", "Reward", "", "reward", "reward/*"], ["Learning", "Sampled accuracy by kind", "%", "accuracy/*"],
  ["Learning", "Completion length", "tokens", "completion_length"], ["Learning", "Cut completions, groups of equal rewards", "%", "truncated", "groups_equal"],
  ["Learning", "Spread of rewards in a group", "", "reward_std"], ["Stability", "KL to the reference", "nats", "kl", "kl_max"],
  ["Stability", "Entropy", "nats", "entropy"], ["Stability", "Gradient norm", "", "grad_norm"], ["Stability", "Loss", "", "loss"],
  ["Stability", "Importance ratio", "", "ratio_mean", "ratio_max"], ["Stability", "Effective sample size", "%", "ess"],
  ["Stability", "Clipped tokens", "%", "clip_low", "clip_high"], ["Stability", "Gap to the sampler's log-probs", "nats", "sampler_gap", "sampler_gap_max"],
  ["Stability", "Learning rate", "", "learning_rate"], ["Cost", "Time per step", "s", "seconds"],
  ["Cost", "Completion tokens per second", "", "tokens per second"],
  ["Cost", "Peak memory", "GiB", "peak_memory_gib"], ["", "", "s", "seconds/*"], ["", "", "%", "zero_gradient", "clip_ratio/*"],
  ["", "", "", "tokens", "sampling/sampling_logp_difference/*"],
];

// Steps of all runs, those that are shown, and the step under the cursor or pinned.
for (const r of R) {
  const size = r.options.get("prompts_per_step") * r.options.get("num_generations");
  const length = r.columns.get("completion_length"), seconds = r.columns.get("seconds");
  if (size && length && seconds) r.columns.set("tokens per second", length.map((n, i) => known(n) && seconds[i] ? n * size / seconds[i] : null));
  r.warned = new Set(r.signs.filter(x => x.warnings?.length || x.explained?.spike).map(x => x.step));
  r.kept = sorted(new Set(r.samples.map(x => x.step)));
}
const steps = sorted(new Set(R.flatMap(r => [...r.steps, ...r.evaluations.map(e => e.step)]))), first = steps[0] ?? 0, last = steps.at(-1) ?? 1;
const warned = new Set(R.flatMap(r => [...r.warned])), longest = most([0, ...R.map(r => r.steps.length)]);
const every = [...new Set(R.flatMap(r => [...r.columns.keys()]))];
let zoom = [first, last], cursor = null, pinned = null, picking = null;
const within = s => s >= zoom[0] && s <= zoom[1], nearest = (list, x) => list.reduce((best, y) => Math.abs(y - x) < Math.abs(best - x) ? y : best, list[0]);

// Pictures with their curves. Equal curves of a run are drawn once; a picture of constant ones is a line of text.
const charts = [], constants = [], units = new Map(), titled = new Map();
function add(section, title, unit, keys, before, own) {
  const short = k => k.slice(k.indexOf("/") + 1), twins = k => keys.some(x => x !== k && [x, short(x)].includes(short(k))), list = [...before];
  const label = k => before.length ? "sampled" : show(twins(k) ? k : own || k.includes("/") ? short(k) : k.replaceAll("_", " "));
  for (const [run, r] of R.entries()) for (const key of keys) {
    const y = r.columns.get(key), twin = y && list.find(c => c.run === run && !c.low && equal(c.y, y));
    if (twin) twin.names.push(label(key)); else if (y) list.push({ run, key, names: [label(key)], x: r.steps, y });
  }
  for (const k of keys) units.set(k, unit);
  if (!list.length || !section) return;
  const metrics = [...new Set(list.map(c => c.key))], several = metrics.length > 1 || list.some(c => c.names[1]), value = c => c.y.find(known);
  if (longest > 1 && list.every(c => !c.low && constant(c.y) && value(c) === value(list.find(x => x.key === c.key)))) {
    const texts = list.filter(c => c.run === list[0].run).map(c => `${several ? `(${c.names.join(" = ")}) ` : ""}${form(unit, value(c))}`);
    constants.push(`${title.toLowerCase()} ${texts.join(" ")}`);
    return;
  }
  list.forEach(c => { const i = metrics.indexOf(c.key); Object.assign(c, many ? { hue: c.run, dash: i % 4 } : { hue: i % 6, dash: Math.floor(i / 6) % 4 }); });
  charts.push({ section, title: title + (unit && unit !== "%" ? `, ${unit}` : ""), unit, curves: list, metrics, several: several || before.length,
    wide: before.length, tall: before.length || title === "Reward",
    log: unit !== "%" && title !== "Learning rate" && spansDecades(list.flatMap(c => c.y.filter(known))) });
}
const heldOut = R.flatMap((r, run) => r.evaluations.length ? [{ run, key: "held out", names: ["held out"], x: r.evaluations.map(e => e.step),
  y: r.evaluations.map(e => e.accuracy), low: r.evaluations.map(e => e.low), high: r.evaluations.map(e => e.high) }] : []);
for (const [section, title, unit, ...patterns] of CHARTS) {
  const keys = patterns.flatMap(p => every.filter(k => p.endsWith("*") ? k.startsWith(p.slice(0, -1)) : k === p));
  add(section, title, unit, keys, title === "Accuracy" ? heldOut : [], false);
}
for (const k of every.filter(k => !units.has(k))) {
  const { chart, unit } = R.map(r => r.metrics.get(k)).find(x => x) ?? {}, title = show(chart ?? k);
  titled.set(title, { unit: show(unit ?? ""), keys: [...titled.get(title)?.keys ?? [], k] });
}
for (const [title, x] of titled) add("Other metrics", title, x.unit, x.keys, [], true);
for (const c of charts) c.decades = c.log;
const windowOf = () => Math.max(7, Math.round((zoom[1] - zoom[0] + 1) / 50));
function measure(c) {
  c.shown = c.curves.map(s => {
    const places = thin(s.y, s.x.flatMap((x, i) => within(x) ? [i] : [])), pick = v => v && places.map(i => v[i]), y = pick(s.y);
    const smooth = $("smooth").checked && !s.low && places.length > 10 && noisy(y) ? smoothed(s.y, places, windowOf()) : null;
    return { ...s, x: pick(s.x), y, low: pick(s.low), high: pick(s.high), smooth };
  });
  c.scale = axis(c.shown.flatMap(s => [...s.y, ...(s.low ?? []), ...(s.high ?? [])].filter(known)), c.unit, c.log);
  const small = x => x && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6) ? x.toExponential().replace("+", "") : comma(x);
  c.ticks = c.scale.ticks.map(x => c.unit === "%" ? `${digits(100 * x, 3)} %` : small(x));
}
function drawChart(c, left) {
  const width = Math.max(200, c.plot.clientWidth), height = c.tall ? 250 : 170, right = width - 6, top = 8, bottom = height - 22, { scale } = c;
  const X = s => left + (right - left) * (zoom[1] === zoom[0] ? .5 : (s - zoom[0]) / (zoom[1] - zoom[0]));
  const Y = x => bottom - (bottom - top) * (scale.at(x) - scale.low) / (scale.high - scale.low);
  const line = (cls, x1, x2, y1, y2) => draw("line", { class: cls, x1, x2, y1, y2 });
  const text = (x, y, anchor, said) => draw("text", { class: "axis", x, y, "text-anchor": anchor }, said);
  const dot = (s, x, y, r, cls = "") => draw("circle", { class: `c${s.hue} ${cls}`, cx: X(x), cy: Y(y), r });
  Object.assign(c, { left, right, top, bottom, X, dot, line, over: draw("g", {}) });
  const g = scale.ticks.map(t => Math.round(Y(t)) + .5).flatMap((y, i) => [line("grid", left, right, y, y), text(left - 7, y + 3.5, "end", c.ticks[i])]);
  g.push(line("base", left, right, bottom + .5, bottom + .5));
  for (const t of nice(...zoom, Math.max(2, Math.floor(width / 70))).filter(Number.isInteger)) {
    const edge = X(t) > right - 12;
    g.push(text(edge ? right : X(t), bottom + 16, edge ? "end" : "middle", t.toLocaleString("en")));
  }
  for (const s of c.shown) {
    const path = y => y.map((v, i) => known(v) ? `${known(y[i - 1]) ? "L" : "M"}${X(s.x[i]).toFixed(1)},${Y(v).toFixed(1)}` : "").join("");
    const curve = (y, cls) => draw("path", { class: `curve c${s.hue} ${cls}`, d: path(y) }), few = s.low || s.y.length < 13;
    if (s.low) g.push(draw("path", { class: `whisker c${s.hue}`, d: s.x.map((x, i) => `M${X(x)},${Y(s.low[i])}V${Y(s.high[i])}`).join("") }));
    g.push(curve(s.y, s.smooth ? "raw" : `d${s.dash}`));
    if (s.smooth) g.push(curve(s.smooth, `d${s.dash}`), ...outliers(s.y, s.smooth, scale).map(i => dot(s, s.x[i], s.y[i], 2)));
    s.y.forEach((v, i) => {
      if (known(v) && (few || !known(s.y[i - 1]) && !known(s.y[i + 1]))) g.push(dot(s, s.x[i], v, s.low ? 4 : few ? 3 : 1.5, few ? "point" : ""));
    });
  }
  for (const s of warned) if (within(s)) g.push(draw("path", { class: "mark", d: `M${X(s) - 3.5},${bottom + 5}h7l-3.5,-5z` }));
  c.plot.replaceChildren(draw("svg", { height, viewBox: `0 0 ${width} ${height}`, ...hidden }, ...g, c.over));
  c.button.ariaPressed = String(c.log);
}

// The step under the cursor: a line in every picture, and its values in the legends. Without one, the last values.
function placeOf(c, step) {
  if (step === null) return c.y.findLastIndex(known);
  const i = c.low ? c.x.findLastIndex(x => x <= step) : R[c.run].at.get(step) ?? -1;
  return i >= 0 && known(c.y[i]) ? i : -1;
}
function point() {
  const step = cursor ?? pinned, at = step === null ? "last step:" : "step";
  const how = step === null ? "" : warned.has(step) ? ", warned" : cursor === null ? ", pinned" : "";
  $("now").replaceChildren(`${at} ${(step ?? last).toLocaleString("en")}${how}`,
    ...R.filter(r => r.pages.includes(step)).flatMap(r => [" ", page(r, step, many ? show(r.name) : "token by token")]));
  for (const c of charts) {
    const said = [], marks = step !== null && within(step) ? [c.line("cursor", c.X(step), c.X(step), c.top, c.bottom)] : [];
    for (const s of c.curves) {
      const i = placeOf(s, step);
      s.out.textContent = i < 0 ? "\u2013" : s.low ? tenths(s.y[i]) + (many ? "" : ` (${interval({ low: s.low[i], high: s.high[i] })})`) : form(c.unit, s.y[i]);
      said.push(`${many ? `${show(R[s.run].name)}, ` : ""}${s.names.join(" = ")} ${s.out.textContent}`);
      if (i >= 0 && step !== null && within(s.x[i])) marks.push(c.dot(s, s.x[i], s.y[i], 4, "point"));
    }
    const [a, b] = sorted(picking ?? []).map(c.X);
    if (picking) marks.push(draw("rect", { class: "picked", x: a, width: b - a, y: c.top, height: c.bottom - c.top }));
    c.over.replaceChildren(...marks);
    Object.assign(c.plot, { ariaValueNow: String(step ?? last), ariaValueText: `step ${step ?? last}: ${said.join(", ")}` });
  }
  const [summary, list] = $("values").children, of = step ?? R[0].steps.at(-1) ?? 0;
  const value = k => R.map(r => form(units.get(k), r.columns.get(k)?.[r.at.get(of)])).join(" \u00b7 ");
  summary.textContent = `Every value of step ${of}`;
  if ($("values").open) list.replaceChildren(...every.map(k => box("div", "", muted(show(k)), make("span", value(k)))));
}
function setZoom(...ends) {
  const [a, b] = ends.map(s => Math.max(first, Math.min(last, s))), middle = (a + b) / 2, half = Math.max(Math.abs(b - a), Math.min(4, last - first)) / 2;
  zoom = [Math.max(first, Math.floor(middle - half)), Math.min(last, Math.ceil(middle + half))];
  redraw();
}
function redraw() {
  for (const [id, value] of [["from", zoom[0]], ["to", zoom[1]]]) Object.assign($(id), { value, min: first, max: last });
  $("all").disabled = zoom[0] === first && zoom[1] === last;
  $("window").textContent = `smooth over ${windowOf()} steps`;
  charts.forEach(measure);
  const left = Math.ceil(most([3, ...charts.flatMap(c => c.ticks.map(x => x.length))]) * 6.2 + 8);  // of all, so that steps lie below each other
  for (const c of charts) drawChart(c, left);
  drawTime();
  point();
}
function pin(step, run) {
  [pinned, cursor] = [step, null];
  if (run !== undefined && R[run].kept.length && chosen() !== R[run]) { $("run").value = run; drawStrip(); }
  if (step !== null && chosen()) showSample(nearest(chosen().kept, step));
  point();
  try { history.replaceState(null, "", step === null ? location.pathname + location.search : `#step-${step}`); } catch { /* a frame without an address */ }
}
function listen(c) {
  const inside = s => Math.max(zoom[0], Math.min(zoom[1], s)), part = e => (e.clientX - c.plot.getBoundingClientRect().left - c.left) / (c.right - c.left);
  const stepAt = e => inside(nearest(steps, zoom[0] + (zoom[1] - zoom[0]) * part(e))), on = (name, f) => c.plot.addEventListener(name, f);
  const leave = () => { cursor = down = picking = null; point(); };
  let down = null;
  on("pointermove", e => { cursor = stepAt(e); picking = down === null || cursor === down ? null : [down, cursor]; point(); });
  on("pointerleave", () => { if (down === null) leave(); });
  on("pointercancel", leave);
  on("pointerdown", e => { if (!e.button && e.pointerType !== "touch") { down = stepAt(e); c.plot.setPointerCapture(e.pointerId); } });
  on("pointerup", e => {
    const range = picking, from = e.pointerType === "touch" ? stepAt(e) : down;
    down = picking = null;
    if (range && Math.abs(range[1] - range[0]) > 1) setZoom(...range); else if (from !== null) pin(pinned === from ? null : from);
  });
  on("keydown", e => {
    const list = steps.filter(within), now = nearest(list, cursor ?? pinned ?? zoom[1]), to = jump(e, list.indexOf(now), list.length), wide = zoom[1] - zoom[0];
    if (list[to] !== undefined) pin(list[to]);
    else if (e.key === "+" || e.key === "=") setZoom(now - wide / 4, now + wide / 4);
    else if (e.key === "-") setZoom(zoom[0] - wide / 2 - 1, zoom[1] + wide / 2 + 1);
    else if (e.key === "Escape") { pin(null); setZoom(first, last); } else return;
    e.preventDefault();
  });
}
function buildCharts() {
  for (const name of new Set([...charts.map(c => c.section), ...(every.some(k => k.startsWith("seconds/")) ? ["Cost"] : [])])) {
    const grid = box("div", "charts");
    $("charts").append(make("h3", name), ...(name === "Cost" ? [Object.assign(make("div"), { id: "time" })] : []), grid);
    for (const c of charts.filter(x => x.section === name)) {
      for (const s of c.curves) s.out = make("b");
      c.button = Object.assign(button("log scale", "", () => { c.log = !c.log; redraw(); }), { hidden: !c.decades });
      c.plot = Object.assign(box("div", "plot"), { tabIndex: 0, role: "slider", ariaLabel: c.title, ariaValueMin: String(first), ariaValueMax: String(last) });
      const legend = c.metrics.map(k => {
        const of = c.curves.filter(s => s.key === k), name = c.several ? [muted(`${of[0].names.join(" = ")} `)] : [];
        return box("span", "", ...(many ? [...name, ...of.flatMap(s => [swatch(s), s.out, "  "])] : [swatch(of[0]), ...name, of[0].out]));
      });
      grid.append(box("figure", c.wide ? "wide" : "", box("figcaption", "", make("h4", c.title), c.button), box("div", "legend", ...legend), c.plot));
      listen(c);
    }
  }
}

// Where a step's time goes: means of steps, those without a value count as 0. Seconds of head and loss are a part of those of `train`.
function parts(r, where) {
  const n = r.steps.filter(where).length || 1, mean = k => sum((r.columns.get(k) ?? []).filter((x, i) => known(x) && where(r.steps[i]))) / n;
  const head = mean("seconds/head"), rest = ["rest of train", Math.max(0, mean("seconds/train") - head)];
  const of = k => k === "train" && head ? [["head and loss", head], rest] : [[k, mean(`seconds/${k}`)]];
  return new Map(every.filter(k => k.startsWith("seconds/") && k !== "seconds/head").flatMap(k => of(k.slice(8))));
}
function drawTime() {
  const bars = R.map(r => parts(r, within)), all = bars.map(x => sum([...x.values()])), names = [...new Set(bars.flatMap(x => [...x.keys()]))];
  const title = `Where a step's time goes: means of steps ${Math.max(1, zoom[0])} to ${zoom[1]}`;
  $("time")?.replaceChildren(...(names.length ? [make("h4", title)] : []), ...bars.flatMap((of, run) => {
    const bar = box("div", "parts"), list = box("div", "list number");
    names.forEach((k, i) => {
      const s = of.get(k) ?? 0, share = s / (all[run] || 1), colour = `c${i % 6}${i > 5 ? " again" : ""}`, block = box("i", colour);
      block.style.flex = `${share} 0 0`;
      if (share > .002) bar.append(block);
      list.append(box("span", "", box("i", `dot ${colour}`), muted(`${show(k)} `), make("b", time(s)), muted(` ${tenths(share)}`)));
    });
    bar.style.width = `${100 * all[run] / (most(all) || 1)}%`;
    return names.length ? [...(many ? [make("div", `${show(R[run].name)}: ${time(all[run])}`, "small")] : []), bar, list] : [];
  }));
}

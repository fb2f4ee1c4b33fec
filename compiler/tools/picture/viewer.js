"use strict";
// The timeline: draws the visible part of the page's data, and describes the step under the pointer.
// The page places rows; this script scales time. `view` is [from, to] in units of time.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const canvas = $("view"), scroller = $("scroller"), strip = $("strip"), tip = $("tip");
const LEFT = 78, RIGHT = 74, AXIS = 26, STRIP = 34;
const FONT = '"Liberation Sans", "DejaVu Sans", Arial, sans-serif';
let view = [0, data.makespan], hovered = null, selected = null, arrows = false, frame = 0, colours = {}, hatch = null;

// ---------------------------------------------------------------- data

const rows = data.panels.flatMap((panel) => panel.rows.map((row) => unpack(row, panel)));
const places = new Map(); // panel, track and label of an action -> [row, index]
rows.forEach((row) => row.steps.forEach((step, i) => step.forEach((action) => places.set(key(row, action.label), [row, i]))));

function key(row, label) { return data.panels.indexOf(row.panel) + "/" + row.track + "/" + label; }

function unpack(row, panel) {
  const tints = row.d; let at = 0, now = 0, live = 0;
  const steps = row.steps ? row.steps.split(" ").map((text) => text.replace(/[()]/g, "").split("|").map((label) => {
    const [, kind, stage, micro] = /^([FBIW])(\d+)\.(\d+)$/.exec(label);
    return { label, kind, stage: +stage, micro: +micro, direction: +tints[at++] };
  })) : [];
  const starts = new Float64Array(steps.length), ends = new Float64Array(steps.length);
  const trains = steps.some((step) => step.some((action) => action.kind !== "F")), keeps = row.keeps ?? 1;
  const frees = trains ? { F: 0, B: 1, I: 1 - keeps, W: keeps } : { F: 1 };
  const times = [0], amounts = [0];
  let next = 0;
  const copies = row.copies || []; // [label, whether back, start, end, before which step, when memory is free or taken]
  steps.forEach((step, i) => {
    for (; next < copies.length && copies[next][4] === i; next++) {
      live += copies[next][1] ? 1 : -1; times.push(copies[next][5]); amounts.push(live * row.one);
    }
    starts[i] = now + data.times[row.g[i]];
    ends[i] = now = starts[i] + data.times[row.t[i]];
    const more = step.filter((action) => action.kind === "F").length;
    const less = step.reduce((sum, action) => sum + frees[action.kind], 0);
    if (more) { live += more; times.push(starts[i]); amounts.push(live * row.one); }
    if (less) { live -= less; times.push(ends[i]); amounts.push(live * row.one); }
  });
  const busy = steps.reduce((sum, _, i) => sum + ends[i] - starts[i], 0);
  const peak = amounts.reduce((most, amount) => Math.max(most, amount), 0);
  return { ...row, panel, steps, starts, ends, times, amounts, busy, peak };
}

const mostActivations = rows.reduce((most, row) => Math.max(most, row.peak), 0) || 1;

/** What an action receives from, and gives to, the stages beside it: [label of the maker, label of the taker]. */
function needsOf(action, row) {
  const step = action.kind === "F" ? -1 : 1, label = action.stage + step + "." + action.micro;
  const kinds = action.kind === "F" ? ["F"] : action.kind === "W" ? [] : ["B", "I"];
  return kinds.map((kind) => places.get(key(row, kind + label))).find(Boolean);
}

/** First index whose value is above x, in an ascending array. */
function above(values, x) {
  let low = 0, high = values.length;
  while (low < high) { const middle = (low + high) >> 1; if (values[middle] > x) high = middle; else low = middle + 1; }
  return low;
}

// ---------------------------------------------------------------- numbers

function number(value) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return value < 1e7 ? Math.round(value).toLocaleString("en-US") : value.toExponential(2);
  return String(+value.toPrecision(4));
}

function ticksOf(low, high, most) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10, 20].map((k) => k * power).find((size) => (high - low) / size <= most - 1);
  const marks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++) marks.push(i * step + 0);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return marks.map((mark) => [mark, mark.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })]);
}

// ---------------------------------------------------------------- drawing

function themed() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "ink", "quiet", "rule", "accent", "warm", "idle", "hatch", "on0", "on1"];
  for (const kind of "FBIW") names.push(kind + 0, kind + 1);
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  const tile = document.createElement("canvas"), size = 7 * devicePixelRatio;
  tile.width = tile.height = size;
  const context = tile.getContext("2d");
  context.fillStyle = colours.idle; context.fillRect(0, 0, size, size);
  context.strokeStyle = colours.hatch; context.lineWidth = devicePixelRatio;
  for (const shift of [-size, 0, size]) { context.beginPath(); context.moveTo(shift, size); context.lineTo(shift + size, 0); context.stroke(); }
  hatch = tile;
  draw();
}

function draw() { if (!frame) frame = requestAnimationFrame(() => { frame = 0; paint(); }); }

function sized(target, width, height) {
  const ratio = devicePixelRatio, w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (target.width !== w || target.height !== h) { target.width = w; target.height = h; target.style.height = height + "px"; }
  const context = target.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const plot = () => Math.max(50, scroller.clientWidth - LEFT - RIGHT);
const unit = () => plot() / (view[1] - view[0]);
const toX = (time) => LEFT + (time - view[0]) * unit();
const toTime = (x) => view[0] + (x - LEFT) / unit();

function paint() {
  const width = scroller.clientWidth, height = scroller.clientHeight;
  const c = sized(canvas, width, height), shift = scroller.scrollTop;
  const pattern = c.createPattern(hatch, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / devicePixelRatio));
  const focus = selected || hovered, bottom = height - AXIS;
  let drawn = 0;
  c.save();
  c.beginPath(); c.rect(0, 0, width, bottom); c.clip();
  c.strokeStyle = colours.rule; c.lineWidth = 1; c.beginPath();
  const marks = ticksOf(view[0], view[1], Math.max(2, Math.floor(plot() / 90)));
  for (const [mark] of marks) { const x = Math.round(toX(mark)) + 0.5; c.moveTo(x, 0); c.lineTo(x, bottom); }
  c.stroke();
  c.translate(0, -shift);
  for (const panel of data.panels) if (panel.name) text(c, panel.name, LEFT, panel.y - 6, 13, colours.ink, "left", "600");
  for (const row of rows) {
    if (row.floor < shift || row.y > shift + height) continue;
    names(c, row, width);
    c.save(); c.beginPath(); c.rect(LEFT, row.y - 2, plot() + 1, row.floor - row.y + 4); c.clip();
    drawn += boxes(c, row, pattern, focus);
    lane(c, row);
    curve(c, row);
    c.restore();
  }
  c.save(); c.beginPath(); c.rect(LEFT, shift, plot() + 1, height); c.clip();
  if (arrows) for (const row of rows) messages(c, row);
  if (focus) chain(c, focus);
  c.restore(); c.restore();
  c.fillStyle = colours.paper; c.fillRect(0, bottom, width, AXIS);
  c.fillStyle = colours.rule; c.fillRect(LEFT, bottom, plot(), 1);
  for (const [mark, label] of marks) text(c, label, toX(mark), bottom + 13, 11, colours.quiet, "center");
  text(c, "time", LEFT - 26, bottom + 13, 11, colours.quiet, "right");
  overview();
  const state = { from: +view[0].toPrecision(9), to: +view[1].toPrecision(9), drawn, focus: focus ? focus.action.label : "" };
  Object.assign(canvas.dataset, state, { track: focus ? focus.row.track : "", arrows, scroll: shift });
}

function text(c, words, x, y, size, colour, align, weight = "400") {
  c.font = weight + " " + size + "px " + FONT; c.textAlign = align; c.textBaseline = "middle"; c.fillStyle = colour;
  c.fillText(words, x, y);
}

function names(c, row, width) {
  const middle = row.y + row.height / 2, before = rows[rows.indexOf(row) - 1];
  const first = !before || before.rank !== row.rank || before.panel !== row.panel;
  const name = row.track ? (first ? row.rank + " " : "") + row.track : "rank " + row.rank;
  text(c, name, LEFT - 12, middle, 11.5, colours.quiet, "right");
  text(c, "idle " + Math.round(100 * (1 - row.busy / row.end)) + "%", width - RIGHT + 10, middle, 11.5, colours.quiet, "left");
  if (row.one) text(c, "peak " + number(row.peak), width - RIGHT + 10, row.floor - data.memory / 2, 10, colours.quiet, "left");
}

function boxes(c, row, pattern, focus) {
  const right = Math.min(toX(row.end), LEFT + plot());
  if (right > LEFT) { c.fillStyle = pattern; c.fillRect(Math.max(LEFT, toX(0)), row.y, right - Math.max(LEFT, toX(0)), row.height); }
  const first = above(row.ends, view[0]), last = above(row.starts, view[1]);
  if (last - first > 2 * plot()) return sampled(c, row);
  for (let i = first; i < last; i++) {
    const x = toX(row.starts[i]), length = (row.ends[i] - row.starts[i]) * unit(), step = row.steps[i];
    const width = Math.max(length - (length > 3 ? 1 : 0), Math.min(length, 0.5)), share = row.height / step.length;
    c.fillStyle = colours.paper; c.fillRect(x, row.y, length, row.height);
    step.forEach((action, half) => {
      const y = row.y + half * share;
      c.globalAlpha = focus && focus.row.panel === row.panel && focus.action.micro !== action.micro ? 0.25 : 1;
      c.fillStyle = colours[action.kind + action.direction]; c.fillRect(x, y, width, share);
      label(c, action, x, y, width, share);
      c.globalAlpha = 1;
    });
    if (row.errors && row.errors[i] !== null) errorOf(c, row, row.errors[i], x, width);
    if (focus && focus.row === row && focus.index === i) {
      c.strokeStyle = colours.ink; c.lineWidth = 2;
      c.strokeRect(x, row.y + (step.length > 1 ? step.indexOf(focus.action) * share : 0), width, share);
    }
  }
  return last - first;
}

/** All of a step's name where it fits, else its micro-batch, else nothing. */
function label(c, action, x, y, width, height) {
  if (width < 7) return;
  const size = height < 16 ? 9 : 10.5, visible = [Math.max(x, LEFT), Math.min(x + width, LEFT + plot())];
  c.font = "400 " + size + "px " + FONT;
  const words = [action.label, String(action.micro)].find((each) => c.measureText(each).width + 2 <= Math.min(width, visible[1] - visible[0]));
  if (words) text(c, words, (visible[0] + visible[1]) / 2, y + height / 2 + 0.5, size, colours["on" + action.direction], "center");
}

/** A bar below a measured step: warm where it took longer than planned, blue where less; as strong as the error. */
function errorOf(c, row, error, x, width) {
  c.globalAlpha = Math.min(1, 0.15 + Math.abs(error) * 1.7);
  c.fillStyle = error > 0 ? colours.warm : colours.accent;
  c.fillRect(x, row.y + row.height, width, 3);
  c.globalAlpha = 1;
}

/** Where steps are thinner than pixels: the one in the middle of each half pixel. */
function sampled(c, row) {
  const pixel = 0.5, from = Math.max(LEFT, toX(0)), to = Math.min(LEFT + plot(), toX(row.end));
  let count = 0;
  for (let x = from; x < to; x += pixel) {
    const time = toTime(x + pixel / 2), i = above(row.ends, time);
    if (i >= row.steps.length || row.starts[i] > time) continue;
    const step = row.steps[i], share = row.height / step.length;
    step.forEach((action, half) => { c.fillStyle = colours[action.kind + action.direction]; c.fillRect(x, row.y + half * share, pixel, share); });
    count++;
  }
  return count;
}

function lane(c, row) {
  const y = row.lane;
  for (const [, direction, start, end] of exchangesOf(row, view[0], view[1], 12 / unit())) {
    c.fillStyle = direction ? colours.warm : colours.accent;
    c.fillRect(toX(start), y, Math.max(0.5, (end - start) * unit() - 0.5), 5);
  }
  for (const [, back, start, end] of copiesOf(row, view[0], view[1])) {
    c.fillStyle = back ? colours.warm : colours.accent;
    c.fillRect(toX(start), y + 2.5 * back, Math.max(0.5, (end - start) * unit() - 0.5), 2.5);
  }
  if (row.x || row.copies || row.floor - row.lane < 6) return;
  const first = above(row.ends, view[0]), last = above(row.starts, view[1]);
  if ((last - first) * 6 > plot()) return;
  for (let i = first; i < last; i++) for (const action of row.steps[i]) {
    const taker = takerOf(action, row);
    if (!taker || taker[0] === row) continue;
    const x = toX(row.ends[i]), down = taker[0].rank > row.rank;
    c.fillStyle = colours[(action.kind === "F" ? "F" : "B") + 1];
    c.beginPath(); c.moveTo(x - 3, y + (down ? 0 : 5)); c.lineTo(x + 3, y + (down ? 0 : 5)); c.lineTo(x, y + (down ? 5 : 0)); c.fill();
  }
}

/** The copies to the host and back between two times. */
function copiesOf(row, from, to) {
  return (row.copies || []).filter(([, , start, end]) => end >= from && start <= to);
}

/** What the lane of a row does between two times, in steps of at least a length: [label, direction, start, end]. */
function exchangesOf(row, from, to, least = 0) {
  const found = [];
  for (let i = above(row.ends, from), last = above(row.starts, to); row.x && i < last; i++) {
    const step = row.steps[i], length = row.ends[i] - row.starts[i];
    if (length < least) continue;
    for (const [label, slot, start, end] of row.x[step.map((action) => action.kind + action.stage).join("_")] || [])
      found.push([label.replace(/\{(\d)\}/, (_, k) => step[k].micro), step[slot].direction, row.starts[i] + start * length, row.starts[i] + end * length]);
  }
  return found;
}

/** Where what an action makes is needed: [row, index]. */
function takerOf(action, row) {
  if (action.kind === "W") return undefined;
  const label = action.stage + (action.kind === "F" ? 1 : -1) + "." + action.micro;
  return (action.kind === "F" ? ["F"] : ["B", "I"]).map((kind) => places.get(key(row, kind + label))).find(Boolean);
}

function curve(c, row) {
  if (!row.one) return;
  const scale = (data.memory - 2) / mostActivations, end = Math.min(toX(row.end), LEFT + plot());
  let i = Math.max(0, above(row.times, view[0]) - 1), height = row.floor - row.amounts[i] * scale;
  const corners = [[LEFT, height]];
  for (i++; i < row.times.length && row.times[i] < view[1];) {
    const x = toX(row.times[i]);
    let most = row.amounts[i];
    for (i++; i < row.times.length && toX(row.times[i]) < x + 0.5; i++) most = Math.max(most, row.amounts[i]);
    const top = row.floor - most * scale, settled = row.floor - row.amounts[i - 1] * scale;
    corners.push([x, height], [x, top], [x, settled]);
    height = settled;
  }
  corners.push([end, height]);
  c.beginPath();
  for (const [x, y] of corners) c.lineTo(x, y);
  c.globalAlpha = 0.6; c.strokeStyle = colours.accent; c.lineWidth = 1; c.stroke();
  c.lineTo(end, row.floor); c.lineTo(LEFT, row.floor);
  c.globalAlpha = 0.2; c.fillStyle = colours.accent; c.fill();
  c.globalAlpha = 1;
}

function messages(c, row) {
  const first = above(row.ends, view[0]), last = above(row.starts, view[1]);
  if ((last - first) * 3 > plot() || !row.one) return; // of tracks, those that were measured
  for (let i = first; i < last; i++) for (const action of row.steps[i]) {
    const taker = takerOf(action, row);
    if (taker && taker[0] !== row) arrow(c, row, row.ends[i], taker[0], colours[(action.kind === "F" ? "F" : "B") + 1], 0.7);
  }
}

/** From the end of a step to the edge of the row that takes its message. */
function arrow(c, from, time, to, colour, alpha) {
  const down = to.y > from.y, x1 = toX(time), x2 = toX(time + from.panel.latency);
  const y1 = down ? from.y + from.height : from.y, y2 = down ? to.y : to.y + to.height, sign = down ? -1 : 1;
  c.globalAlpha = alpha; c.strokeStyle = c.fillStyle = colour; c.lineWidth = 1.2;
  c.beginPath(); c.moveTo(x1, y1); c.lineTo(x2, y2); c.stroke();
  c.beginPath(); c.moveTo(x2, y2); c.lineTo(x2 - 3, y2 + 5 * sign); c.lineTo(x2 + 3, y2 + 5 * sign); c.fill();
  c.globalAlpha = 1;
}

/** The way of one micro-batch through the stages. */
function chain(c, focus) {
  for (const row of rows) {
    if (row.panel !== focus.row.panel || row.track !== focus.row.track) continue;
    row.steps.forEach((step, i) => step.forEach((action) => {
      const taker = action.micro === focus.action.micro && takerOf(action, row);
      if (taker && taker[0] !== row) arrow(c, row, row.ends[i], taker[0], colours.ink, 0.8);
    }));
  }
}

// ---------------------------------------------------------------- the strip

let load = null;

function busyShare(count) {
  const bins = new Float64Array(count), size = data.makespan / count;
  for (const row of rows) row.steps.forEach((_, i) => {
    for (let b = Math.floor(row.starts[i] / size); b < count && b * size < row.ends[i]; b++)
      bins[b] += Math.max(0, Math.min(row.ends[i], (b + 1) * size) - Math.max(row.starts[i], b * size));
  });
  return bins.map((sum) => sum / (size * rows.length));
}

function overview() {
  const width = strip.clientWidth, c = sized(strip, width, STRIP), shown = plot(), count = Math.min(400, Math.floor(shown));
  if (!load || load.length !== count) load = busyShare(count);
  c.fillStyle = colours.idle; c.fillRect(LEFT, 2, shown, STRIP - 4);
  c.fillStyle = colours.accent; c.globalAlpha = 0.3;
  load.forEach((share, i) => c.fillRect(LEFT + (i * shown) / count, STRIP - 2 - share * (STRIP - 4), shown / count + 0.3, share * (STRIP - 4)));
  c.globalAlpha = 1;
  const x1 = LEFT + (view[0] / data.makespan) * shown, x2 = LEFT + (view[1] / data.makespan) * shown;
  c.strokeStyle = colours.ink; c.lineWidth = 1; c.strokeRect(x1 + 0.5, 1.5, Math.max(2, x2 - x1 - 1), STRIP - 3);
  text(c, "busy", LEFT - 12, STRIP / 2, 11, colours.quiet, "right");
  const all = rows.reduce((sum, row) => sum + row.busy, 0) / (data.makespan * rows.length);
  text(c, Math.round(100 * all) + "%", width - RIGHT + 10, STRIP / 2, 11, colours.quiet, "left");
  strip.setAttribute("aria-valuenow", Math.round((50 * (view[0] + view[1])) / data.makespan));
  strip.setAttribute("aria-valuetext", number(view[0]) + " to " + number(view[1]));
}

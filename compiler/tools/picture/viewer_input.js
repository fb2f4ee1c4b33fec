// Pointer and keys: moving, inspecting, and the page around the canvas. Loaded after viewer.js.

// ---------------------------------------------------------------- moving

function show(from, to) {
  const least = data.makespan * 1e-6, length = Math.min(data.makespan, Math.max(least, to - from));
  const start = Math.min(Math.max(0, from + (to - from - length) / 2), data.makespan - length);
  view = [start, start + length];
  draw();
}

function zoom(factor, time = (view[0] + view[1]) / 2) { show(time - (time - view[0]) / factor, time + (view[1] - time) / factor); }
function pan(share) { const by = share * (view[1] - view[0]), room = Math.min(Math.max(by, -view[0]), data.makespan - view[1]); show(view[0] + room, view[1] + room); }

// ---------------------------------------------------------------- inspecting

/** What is at a point of the canvas: an action, a bubble, an exchange, or nothing. */
function at(x, y) {
  const down = y + scroller.scrollTop, time = toTime(x);
  const row = rows.find((each) => down >= each.y - 1 && down <= each.floor);
  if (!row || x < LEFT || x > LEFT + plot() || time < 0 || time > row.end) return null;
  const half = down < row.lane + 2.5 ? 0 : 1; // of the lane: copies to the host, and back
  const lanes = [...exchangesOf(row, time, time), ...copiesOf(row, time, time).filter(([, back]) => back === half)];
  const exchange = down > row.lane && lanes.find(([, , start, end]) => start <= time && time < end);
  if (exchange) return { row, exchange };
  const index = above(row.ends, time);
  if (index < row.steps.length && row.starts[index] <= time) {
    const step = row.steps[index];
    return { row, index, action: step[step.length > 1 && down >= row.y + row.height / 2 ? 1 : 0] };
  }
  return { row, index, idle: [index ? row.ends[index - 1] : 0, index < row.steps.length ? row.starts[index] : row.end] };
}

function described(found) {
  const { row, index, action } = found;
  const where = "rank " + row.rank + (row.track ? ", " + row.track : "") + (row.panel.name ? " of " + row.panel.name : "");
  if (found.exchange) return [found.exchange[0], where, number(found.exchange[2]) + " to " + number(found.exchange[3]) + ", " + number(found.exchange[3] - found.exchange[2]) + " long"];
  if (found.idle) {
    const [start, end] = found.idle, next = row.steps[index], lines = ["idle", where, number(start) + " to " + number(end) + ", " + number(end - start) + " long"];
    if (next) lines.push("then " + next.map((each) => each.label).join(" and ") + waited(row, index));
    return lines;
  }
  const start = row.starts[index], end = row.ends[index], direction = row.panel.directions;
  const lines = [action.label, data.kinds[action.kind] + " of stage " + action.stage + ", micro-batch " + action.micro, where];
  if (direction.length > 1) lines.push(direction[action.direction]);
  lines.push(number(start) + " to " + number(end) + ", " + number(end - start) + " long");
  const other = row.steps[index].find((each) => each !== action);
  if (other) lines.push("overlapped with " + other.label);
  if (row.one) lines.push(number(row.amounts[above(row.times, start) - 1]) + " activations held");
  if (row.notes && row.notes[index]) lines.push(row.notes[index]);
  return lines;
}

/** Which message a step waits for: the one that arrives last. */
function waited(row, index) {
  const needs = row.steps[index].map((action) => [action, needsOf(action, row)]).filter(([, need]) => need && need[0] !== row);
  if (!needs.length) return "";
  const [action, [from, i]] = needs.reduce((a, b) => (b[1][0].ends[b[1][1]] > a[1][0].ends[a[1][1]] ? b : a));
  const maker = from.steps[i].find((each) => each.micro === action.micro);
  return ", which waits for " + maker.label + " of rank " + from.rank;
}

function say(found, x, y) {
  if (!found) { tip.hidden = true; return; }
  const lines = described(found), name = document.createElement("b");
  name.textContent = lines[0];
  tip.replaceChildren(name, "\n" + lines.slice(1).join("\n"));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 16, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(4, y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18) + "px";
}

function select(row, index, half = 0) {
  if (!row || !row.steps.length) return;
  index = Math.min(Math.max(0, index), row.steps.length - 1);
  selected = { row, index, action: row.steps[index][Math.min(half, row.steps[index].length - 1)] };
  const start = row.starts[index], end = row.ends[index], length = view[1] - view[0];
  if (start < view[0] || end > view[1]) show((start + end - length) / 2, (start + end + length) / 2);
  if (row.y < scroller.scrollTop + 4) scroller.scrollTop = row.y - 12;
  if (row.floor > scroller.scrollTop + scroller.clientHeight - AXIS) scroller.scrollTop = row.floor - scroller.clientHeight + AXIS + 8;
  $("said").textContent = described(selected).join(", ");
  const box = canvas.getBoundingClientRect();
  say(selected, box.left + toX((start + end) / 2), box.top + row.y - scroller.scrollTop + row.height);
  draw();
}

function release() { selected = hovered = null; tip.hidden = true; $("said").textContent = ""; draw(); }

// ---------------------------------------------------------------- events

let drag = null;

canvas.addEventListener("pointermove", (event) => {
  if (drag) {
    drag.moved = drag.moved || Math.abs(event.clientX - drag.x) + Math.abs(event.clientY - drag.y) > 3;
    if (!drag.moved) return;
    tip.hidden = true;
    const by = (drag.x - event.clientX) / unit(), length = drag.view[1] - drag.view[0];
    const from = Math.min(Math.max(0, drag.view[0] + by), data.makespan - length);
    scroller.scrollTop = drag.top + drag.y - event.clientY;
    show(from, from + length);
    return;
  }
  const found = at(event.offsetX, event.offsetY);
  hovered = found && found.action ? found : null;
  if (!selected || found) say(found, event.clientX, event.clientY);
  draw();
});
canvas.addEventListener("pointerleave", () => { hovered = null; if (!selected) tip.hidden = true; draw(); });
canvas.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  drag = { x: event.clientX, y: event.clientY, view, top: scroller.scrollTop, moved: false };
  canvas.setPointerCapture(event.pointerId); canvas.classList.add("dragged");
});
canvas.addEventListener("pointerup", (event) => {
  canvas.classList.remove("dragged");
  const clicked = drag && !drag.moved;
  drag = null;
  if (!clicked) return;
  const found = at(event.offsetX, event.offsetY);
  if (found && found.action && !(selected && selected.action === found.action)) select(found.row, found.index, found.row.steps[found.index].indexOf(found.action));
  else release();
});
canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("dragged"); });
canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 0.5 : 2, toTime(event.offsetX)));
canvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(-event.deltaY / 300), toTime(event.offsetX)); }
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); pan((event.deltaX || event.deltaY) / plot()); }
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const s = selected, index = s ? rows.indexOf(s.row) : -1, half = s ? s.row.steps[s.index].indexOf(s.action) : 0;
  const middle = s ? (s.row.starts[s.index] + s.row.ends[s.index]) / 2 : 0;
  const moves = {
    ArrowRight: () => (event.shiftKey ? pan(0.2) : s ? select(s.row, s.index + 1) : select(rows[0], 0)),
    ArrowLeft: () => (event.shiftKey ? pan(-0.2) : s ? select(s.row, s.index - 1) : select(rows[0], 0)),
    ArrowDown: () => beside(1), ArrowUp: () => beside(-1),
    Enter: () => s && show(middle - 4 * (s.row.ends[s.index] - s.row.starts[s.index]), middle + 4 * (s.row.ends[s.index] - s.row.starts[s.index])),
    Escape: release, "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: fit,
    Home: () => pan(-1e9), End: () => pan(1e9), m: toggleArrows, t: toggleTheme,
  };
  function beside(by) {
    if (!s) return select(rows[0], 0);
    if (s.row.steps[s.index].length > 1 && half + by in [0, 1]) return select(s.row, s.index, half + by);
    const row = rows[Math.min(Math.max(0, index + by), rows.length - 1)];
    if (row !== s.row) select(row, above(row.ends, middle), by > 0 ? 0 : 1);
  }
  const move = moves[event.key];
  if (move) { event.preventDefault(); move(); }
});

function stripTo(event) {
  const length = view[1] - view[0], time = ((event.offsetX - LEFT) / plot()) * data.makespan - length / 2;
  const from = Math.min(Math.max(0, time), data.makespan - length);
  show(from, from + length);
}
strip.addEventListener("pointerdown", (event) => { strip.setPointerCapture(event.pointerId); stripTo(event); });
strip.addEventListener("pointermove", (event) => { if (event.buttons) stripTo(event); });
strip.addEventListener("keydown", (event) => {
  const by = { ArrowRight: 0.1, ArrowUp: 0.1, ArrowLeft: -0.1, ArrowDown: -0.1, PageUp: 0.9, PageDown: -0.9, Home: -1e9, End: 1e9 }[event.key];
  if (by) { event.preventDefault(); pan(by); }
});

function fit() { show(0, data.makespan); }
function toggleArrows() { arrows = !arrows; $("arrows").setAttribute("aria-pressed", arrows); draw(); }
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
function toggleTheme() {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
  root.dataset.theme = dark ? "light" : "dark";
  themed();
}
$("in").addEventListener("click", () => zoom(1.5));
$("out").addEventListener("click", () => zoom(1 / 1.5));
$("fit").addEventListener("click", fit);
$("arrows").addEventListener("click", toggleArrows);
$("theme").addEventListener("click", toggleTheme);
prefersDark.addEventListener("change", themed);
scroller.addEventListener("scroll", draw);

function arrange() {
  const room = Math.max(220, innerHeight - scroller.getBoundingClientRect().top - scrollY - STRIP - 60);
  const height = Math.min(data.height + AXIS, room);
  scroller.style.height = height + "px";
  $("spacer").style.height = Math.max(0, data.height + AXIS - height) + "px";
  load = null;
  draw();
}
new ResizeObserver(arrange).observe(document.body);
addEventListener("resize", arrange);
arrange();
themed();

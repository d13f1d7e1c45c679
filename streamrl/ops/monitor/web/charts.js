"use strict";
// Drawing, in a box of its own units: lines, stacked areas, and marks. The server puts this into the page.
//
//   chart({label: [[x, y], ..]}, options) -> [picture, legend]
//
// options: title; stacked; marks {label: [[x, y], ..]}; smoothing, the window of the running mean as a share of the points;
// tick and mark, which label the axes; onDrag(from, to), called with a selected span; empty, the text without points.

const WIDTH = 400, HEIGHT = 190, LEFT = 54, RIGHT = 10, TOP = 10, BOTTOM = 22;
const COLOURS = 8, FEW_POINTS = 60, LEAST_DRAG = 0.03;
const DASHES = ["", "6 3", "2 3"];  // lines beyond the eighth have an earlier one's colour
let isSelecting = false;  // a span: charts are not redrawn meanwhile

function make(tag, attributes = {}, ...children) {
  const node = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Numbers as people read them

function short(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (Number.isInteger(value)) return String(value);
  return size < 0.001 ? value.toExponential(1) : size < 10 ? value.toFixed(3) : value.toFixed(1);
}

function ticks(low, high) {  // round numbers, three to eight
  const largest = (high - low) / 3, power = 10 ** Math.floor(Math.log10(largest) + 1e-6);
  const step = [5, 2, 1].map(factor => factor * power).find(size => size <= largest * 1.001);
  const count = Math.floor(high / step + 1e-6) - Math.ceil(low / step - 1e-6) + 1;
  return Array.from({length: count}, (_, place) => Number(((Math.ceil(low / step - 1e-6) + place) * step).toPrecision(10)));
}

function tickLabel(value, step) {  // with enough digits to tell it from the next
  if (value === 0) return "0";
  if (step >= 1) return short(value);
  return Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(-Math.floor(Math.log10(step) + 1e-6));
}

// Points

function smooth(points, share) {  // each the mean of those around it
  const half = Math.round(points.length * share / 2);
  return points.map(([x], place) => {
    const near = points.slice(Math.max(0, place - half), place + half + 1);
    return [x, near.reduce((sum, point) => sum + point[1], 0) / near.length];
  });
}

function stack(layers) {  // [x, from, to] of each
  const below = new Map();
  return layers.map(points => points.map(([x, y]) => {
    const from = below.get(x) || 0;
    below.set(x, from + y);
    return [x, from, from + y];
  }));
}

function stairs(changes, end) {  // a value holds until the next
  return changes.flatMap(([x, y], place) => [[x, y], [place + 1 < changes.length ? changes[place + 1][0] : end, y]]);
}

function nearest(points, x) {
  return points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
}

// The picture

function chart(series, options) {
  const names = Object.keys(series).filter(name => series[name].length);
  const marks = Object.entries(options.marks || {}).filter(([, points]) => points.length);
  if (!names.length) return [make("p", {class: "dim"}, options.empty || "Nothing has been recorded yet.")];
  const raw = names.map(name => series[name]);
  const areas = options.stacked ? stack(raw) : [];
  const space = scales(options.stacked ? areas.flat().flatMap(([x, from, to]) => [[x, from], [x, to]]) : raw.flat());
  const latest = names.map(name => name + " " + (options.mark || short)(series[name].at(-1)[1])).join(", ");
  const picture = make("svg:svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${options.title}: ${latest}`},
    ...axes(space, options), ...areas.map((points, place) => area(points, place, space)));
  if (!options.stacked) raw.forEach((points, place) => picture.append(...line(points, place, space, options.smoothing)));
  marks.forEach(([name, points], place) => picture.append(...points.map(point =>
    pin(point, names.length + place, space, `${name} ${short(point[1])} at ${options.tick(point[0])}`))));
  const shown = [...names.map(name => [name, series[name]]), ...marks];
  follow(picture, space, shown, options);
  return [picture, make("ul", {class: "legend"}, ...shown.map(([name, points], place) => make("li", {},
    make("span", {style: `border-top:3px ${["solid", "dashed", "dotted"][turn(place)]} ${colour(place)}`}),
    `${name} ${(options.mark || short)(points.at(-1)[1])}`)))];
}

const colour = place => `var(--s${place % COLOURS})`;
const turn = place => Math.floor(place / COLOURS) % DASHES.length;
const path = (points, {x, y}) => points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");

function scales(points) {
  const bounds = at => points.reduce(([low, high], point) => [Math.min(low, point[at]), Math.max(high, point[at])],
    [Infinity, -Infinity]);
  let [[left, right], [low, high]] = [bounds(0), bounds(1)];
  if (left === right) right = left + 1;
  if (low === high) { low -= Math.abs(low) / 2 || 0.5; high += Math.abs(high) / 2 || 0.5; }
  return {left, right, low, high,
    x: value => LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT),
    y: value => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)};
}

function axes({left, right, low, high, y}, {tick, mark}) {
  const values = ticks(low, high), label = mark || (value => tickLabel(value, values[1] - values[0]));
  const lines = values.filter(label).flatMap(value => [
    make("svg:line", {class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value)}),
    make("svg:text", {x: LEFT - 5, y: y(value) + 4, "text-anchor": "end"}, label(value))]);
  return [...lines, make("svg:text", {x: LEFT, y: HEIGHT - 6}, tick(left)),
    make("svg:text", {x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end"}, tick(right))];
}

function area(points, place, space) {
  const up = points.map(([x, , to]) => [x, to]), down = points.map(([x, from]) => [x, from]).reverse();
  return make("svg:polygon", {points: path([...up, ...down], space), style: `fill:${colour(place)};fill-opacity:.75`});
}

function line(points, place, space, smoothing) {
  const drawn = (shown, width, opacity) => make("svg:polyline", {points: path(shown, space), style: `fill:none;`
    + `stroke:${colour(place)};stroke-width:${width};stroke-opacity:${opacity};stroke-dasharray:${DASHES[turn(place)] || "none"}`});
  if (points.length > FEW_POINTS)
    return smoothing ? [drawn(points, 0.7, 0.35), drawn(smooth(points, smoothing), 1.8, 1)] : [drawn(points, 1.6, 1)];
  return [drawn(points, 1.6, 1), ...points.map(([x, y]) =>
    make("svg:circle", {cx: space.x(x), cy: space.y(y), r: points.length > 10 ? 2 : 3.5, style: `fill:${colour(place)}`}))];
}

function pin([x], place, space, text) {
  const style = `stroke:${colour(place)};stroke-width:1.2;fill:${colour(place)}`, at = space.x(x);
  return make("svg:path", {d: `M${at},${HEIGHT - BOTTOM}V${TOP}l-3,-5h6l-3,5`, style}, make("svg:title", {}, text));
}

// The pointer: what is under it, and a span selected by dragging

function follow(picture, {left, right}, shown, {tick, mark = short, onDrag}) {
  let began = null;
  const place = event => {
    const box = picture.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    return left + Math.max(0, Math.min(1, share)) * (right - left);
  };
  picture.addEventListener("pointermove", event => {
    showTip(event, shown.map(([name, points]) => {
      const [x, y] = nearest(points, place(event));
      return `${name} ${mark(y)} at ${tick(x)}`;
    }).join("   "));
  });
  const leave = () => { document.getElementById("tip").hidden = true; began = null; isSelecting = false; };
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("pointercancel", leave);
  if (!onDrag) return;
  picture.addEventListener("pointerdown", event => { began = place(event); isSelecting = true; });
  picture.addEventListener("pointerup", event => {
    const [from, to] = [began, place(event)].sort((a, b) => a - b);
    const isWide = began !== null && to - from > LEAST_DRAG * (right - left);
    leave();
    if (isWide) onDrag(from, to);
  });
}

function showTip(event, text) {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.max(0, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = event.clientY + 14 + "px";
}

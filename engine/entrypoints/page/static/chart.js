// Time series as SVG: lines, or bands that add up. Drawn anew with each answer.

import { el, svg } from "./dom.js";
import { ago } from "./format.js";

const WIDTH = 600;
const HEIGHT = 64;

/**
 * A chart of the `lengthS` seconds up to `endS`.
 *
 * series: [{name, kind, points: [{timeS, value}]}], `kind` being the class that colours it and a
 * null value a gap. options: `top`, the value at the upper edge, or null for the highest value;
 * `stacked`, whether the series lie on one another; `text`, how a value is written.
 */
export function chart(label, series, { lengthS, endS, top = null, stacked = false, text }) {
  const bases = stacked ? stack(series) : series.map((each) => each.points.map(() => 0));
  const highest = Math.max(0, ...series.flatMap((each, index) =>
    each.points.map((point, at) => (point.value ?? 0) + bases[index][at])));
  const upper = top ?? highest;
  const place = {
    x: (timeS) => WIDTH * (1 - (endS - timeS) / lengthS),
    y: (value) => HEIGHT - 1 - (HEIGHT - 3) * (upper > 0 ? Math.min(1, value / upper) : 0),
  };
  const drawing = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "plot", role: "img",
    "aria-label": `${label}, now: ${readOut(series, endS, text)}`,
  });
  for (const [index, each] of series.entries()) {
    for (const run of runs(each.points, bases[index])) {
      drawing.append(...(stacked ? [band(run, each.kind, place)] : line(run, each.kind, place)));
    }
  }
  const remark = el("span", {}, top === null ? `top ${text(upper)}` : "");
  const figure = el("figure", { class: "chart" },
    drawing,
    el("figcaption", {}, el("span", {}, ago(lengthS)), remark, el("span", {}, "now")));
  followPointer(figure, drawing, label, (at) => {
    const timeS = endS - lengthS * (1 - at);
    remark.textContent = `${ago(endS - timeS)}: ${readOut(series, timeS, text)}`;
  });
  return figure;
}

/** Where the pointer is: on the chart of that label, `at` as a share of its width. */
let pointed = null;

/** Mark the place under the pointer and `tell` it, also on the chart that replaces this one. */
function followPointer(figure, drawing, label, tell) {
  const cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, x1: -9, x2: -9 });
  drawing.append(cursor);
  const mark = () => {
    cursor.setAttribute("x1", WIDTH * pointed.at);
    cursor.setAttribute("x2", WIDTH * pointed.at);
    tell(pointed.at);
  };
  figure.addEventListener("pointermove", (event) => {
    const { left, width } = drawing.getBoundingClientRect();
    pointed = { label, at: Math.min(1, Math.max(0, (event.clientX - left) / width)) };
    mark();
  });
  figure.addEventListener("pointerleave", () => {
    pointed = null;
  });
  if (pointed?.label === label) mark();
}

/** The values next to a time, with their names. */
function readOut(series, timeS, text) {
  return series.map(({ name, points }) => {
    const nearest = points.reduce(
      (best, point) =>
        Math.abs(point.timeS - timeS) < Math.abs((best?.timeS ?? Infinity) - timeS) ? point : best,
      null);
    return `${name} ${text(nearest?.value ?? null)}`;
  }).join(", ");
}

/** Where each band begins: on the sum of the bands before it. */
function stack(series) {
  let base = series[0].points.map(() => 0);
  return series.map((each) => {
    const own = base;
    base = base.map((value, at) => value + (each.points[at].value ?? 0));
    return own;
  });
}

/** Points without gaps: lists of {timeS, low, high}. */
function runs(points, base) {
  const found = [[]];
  for (const [at, point] of points.entries()) {
    if (point.value === null) found.push([]);
    else found.at(-1).push({ timeS: point.timeS, low: base[at], high: base[at] + point.value });
  }
  return found.filter((run) => run.length > 0);
}

const trace = (run, edge, place) =>
  run.map((point) => `${place.x(point.timeS).toFixed(1)},${place.y(point[edge]).toFixed(1)}`);

function band(run, kind, place) {
  const outline = [...trace(run, "high", place), ...trace(run, "low", place).reverse()];
  return svg("polygon", { points: outline.join(" "), class: `band ${kind}` });
}

function line(run, kind, place) {
  const outline = [...trace(run, "high", place), ...trace(run, "low", place).reverse()];
  return [
    svg("polygon", { points: outline.join(" "), class: `shade ${kind}` }),
    svg("polyline", { points: trace(run, "high", place).join(" "), class: `line ${kind}` }),
  ];
}

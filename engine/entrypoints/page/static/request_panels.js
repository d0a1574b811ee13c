// Panels about requests: how many come and wait, how long they take, what went wrong, by which
// weights they were answered. A panel is a function of its body and a view, as in state_panels.js.

import { chart } from "./chart.js";
import { el, figure, scrollable, swatch, table } from "./dom.js";
import { count, number, percent, seconds, short } from "./format.js";
import { quantile } from "./samples.js";

const TASKS = ["rank", "retrieve", "prefetch"];
const WAITS = ["waiting", "running"];

const ANSWERED = "request_seconds";
const TIMES = [
  { name: "request", metric: ANSWERED, title: "Admission to answer" },
  { name: "queue", metric: "queue_seconds", title: "Admission to first piece" },
  { name: "copy wait", metric: "onload_wait_seconds", title: "Waiting for copies, per step" },
  { name: "step", metric: "step_seconds", title: "Device time of a step" },
];
const QUANTILES = [["p50", 0.5], ["p90", 0.9], ["p99", 0.99]];
const CHARTED = [QUANTILES[0], QUANTILES[2]];

export function drawLoad(body, { samples, windowS, span, range }) {
  const total = requestRate(span);
  const tasks = TASKS.filter((task) => task === TASKS[0] || hasAsked(span, task));
  body.replaceChildren(
    el("div", { class: "figures" },
      figure("a second", number(total)),
      ...WAITS.map((name) => figure(name, count(span.last.value(`requests_${name}`))))),
    legend(tasks.map((task) => ({
      kind: task, name: task, text: number(requestRate(span, task)),
    }))),
    chart("Requests a second",
      tasks.map((task) => ({
        name: task, kind: task, points: samples.rate(windowS, (each) => requestRate(each, task)),
      })),
      { ...range, text: (value) => `${number(value)}/s` }),
    legend(WAITS.map((name) => ({ kind: name, name, text: "" }))),
    chart("Requests waiting and running",
      WAITS.map((name) => ({
        name, kind: name, points: samples.gauge(windowS, (each) => each.value(`requests_${name}`)),
      })),
      { ...range, text: count }));
}

function hasAsked(span, task) {
  return span.rises("requests_total").some(({ labels }) => labels.task === task);
}

/** Requests a second that reached the core, of one task or of all; null without a time between. */
function requestRate(span, task = null) {
  if (span.lengthS === 0) return null;
  const rise = span.rises("requests_total")
    .filter(({ labels }) => task === null || labels.task === task)
    .reduce((sum, each) => sum + each.rise, 0);
  return rise / span.lengthS;
}

function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(({ kind, name, text }) =>
    el("li", {}, swatch(kind), `${name} `, el("strong", {}, text))));
}

export function drawLatency(body, { samples, windowS, span, recently, range }) {
  const columns = [{ title: "" }, ...QUANTILES.map(([title]) => ({ title, numeric: true }))];
  const rows = TIMES.map(({ name, metric, title }) => {
    const observed = span.histogram(metric);
    return [
      el("span", { title }, name),
      ...QUANTILES.map(([, q]) => upTo(quantile(observed, q), observed.edges)),
    ];
  });
  const answered = span.histogram(ANSWERED).counts.reduce((sum, each) => sum + each, 0);
  body.replaceChildren(
    table(`Latency, ${recently}`, columns, rows),
    el("p", { class: "note" }, `${count(answered)} answers in the ${recently}`),
    legend(CHARTED.map(([name]) => ({ kind: name, name: `${name} of request`, text: "" }))),
    chart("Request latency",
      CHARTED.map(([name, q]) => ({
        name,
        kind: name,
        points: samples.rate(windowS, (each) => finite(quantile(each.histogram(ANSWERED), q))),
      })),
      { ...range, text: seconds }));
}

function upTo(value, edges) {
  return value === Infinity ? `> ${seconds(edges.at(-1))}` : seconds(value);
}

function finite(value) {
  return value === Infinity ? null : value;
}

export function drawOutcomes(body, { span, recently }) {
  const rows = [
    ...events(span, "requests_total",
      ({ outcome }) => outcome !== "ok" && outcome, ({ task }) => task),
    ...events(span, "deadline_drops_total", ({ stage }) => `late: ${stage}`),
    ...events(span, "http_requests_total",
      ({ status }) => Number(status) >= 400 && `HTTP ${status}`, ({ route }) => route),
    ...events(span, "copy_failures_total", () => "copies failed"),
    ...events(span, "invalidations_total", ({ reason }) => `states cut: ${reason}`),
    ...events(span, "offload_skipped_total", () => "offloads skipped"),
    ...events(span, "evicted_pages_total", ({ tier }) => `${tier} pages evicted`),
    ...events(span, "dropped_tokens_total", () => "tokens dropped"),
  ];
  if (rows.length === 0) {
    body.replaceChildren(el("p", { class: "note" }, "None since the server started."));
    return;
  }
  const columns = [
    { title: "" },
    { title: recently, numeric: true },
    { title: "since start", numeric: true },
  ];
  body.replaceChildren(
    table("Errors and evictions", columns, rows.map(({ name, detail, rise, total }) => [
      el("span", { title: detail.join(", ") || null }, name), short(rise), short(total),
    ])));
}

/**
 * What of a counter has happened, added up by the name that `nameOf` gives to its labels (false
 * leaves a sample out). `detailOf` gives what was added up.
 */
function events(span, metric, nameOf, detailOf = () => null) {
  const byName = new Map();
  for (const { labels, rise, total } of span.rises(metric)) {
    const name = nameOf(labels);
    if (!name || total === 0) continue;
    const sum = byName.get(name) ?? { name, detail: [], rise: 0, total: 0 };
    const detail = detailOf(labels);
    byName.set(name, {
      name,
      detail: detail ? [...sum.detail, `${detail} ${count(total)}`] : sum.detail,
      rise: sum.rise + rise,
      total: sum.total + total,
    });
  }
  return [...byName.values()];
}

/** The loaded versions, once there is more than one: where they stand and what they hold. */
export function drawVersions(card, { weights }) {
  card.hidden = weights.length < 2;
  if (card.hidden) return;
  const columns = [
    { title: "version" }, { title: "state" }, { title: "catalogue" },
    ...["share", "canary", "requests", "users", "pages", "chunks"].map((title) => ({
      title, numeric: true,
    })),
  ];
  const rows = weights.map((each) => [
    each.version, each.state, each.catalogue_version, percent(each.share), percent(each.canary),
    count(each.requests), count(each.users), count(each.pages), count(each.chunks),
  ]);
  card.querySelector(".body").replaceChildren(
    scrollable("Weights versions", table("Weights versions", columns, rows)));
}

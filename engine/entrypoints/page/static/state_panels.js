// Panels about user state: how full the tiers are, where history tokens came from, the copies.
//
// A panel is a function of its body and a view:
//   samples, windowS   what is known, and how much of it counts as recent
//   span, recently     that part, and its length in words
//   range              the end and the length of the charts
//   model, weights     the answers of /v2/models/{name} and /v1/weights:list

import { chart } from "./chart.js";
import { bar, el, figure, swatch } from "./dom.js";
import { bytes, bytesOf, count, number, percent, seconds, short } from "./format.js";
import { share } from "./samples.js";

const TIERS = [
  { tier: "device", unit: "pages", size: "page_size" },
  { tier: "host", unit: "chunks", size: "chunk_size" },
];

const hits = (tier) => (span) => span.rise("hit_tokens_total", { tier });
const SOURCES = [
  { kind: "device", rise: hits("device") },
  { kind: "host", rise: hits("host") },
  { kind: "computed", rise: (span) => span.rise("computed_tokens_total") },
];

const ALL_TOKENS = "history_tokens_total"; // of which those are the parts

const DIRECTIONS = [
  { direction: "onload", meaning: "host to device" },
  { direction: "offload", meaning: "device to host" },
];

export function drawTiers(body, view) {
  body.replaceChildren(...TIERS.map((each) => tierColumn(each, view)));
}

function tierColumn({ tier, unit, size }, { samples, windowS, range, model }) {
  const latest = samples.latest;
  const used = `${tier}_${unit}_used`;
  const [inUse, all] = [latest.value(used), latest.value(`${tier}_${unit}_total`)];
  const filled = share(inUse, all);
  const users = latest.value("users_resident", { tier });
  return el("div", { class: "tier", "data-tier": tier },
    el("div", { class: "heading" },
      el("h3", {}, swatch(tier), `${tier} ${unit}`),
      el("span", { class: "note" }, `${count(users)} ${users === 1 ? "user" : "users"}`)),
    el("p", { class: "amount" },
      el("span", { class: "value" }, count(inUse)),
      el("span", { class: "of" }, ` of ${count(all)} ${unit}`),
      el("span", { class: "right" }, percent(filled))),
    bar(`${tier} ${unit} in use: ${percent(filled)}`, [{ kind: tier, share: filled ?? 0 }]),
    extent(inUse, all, model.parameters, size),
    chart(`${tier} ${unit} in use`,
      [{ name: "in use", kind: tier, points: samples.gauge(windowS, (each) => each.value(used)) }],
      { ...range, top: all, text: count }));
}

/** The same amount in tokens and bytes. */
function extent(inUse, all, parameters, size) {
  if (all === 0) return el("p", { class: "note" }, "This tier is off.");
  const [used, whole] = [inUse * parameters[size], all * parameters[size]];
  return el("p", { class: "heading note" },
    el("span", {}, `${short(used)} of ${short(whole)} tokens`),
    el("span", {}, bytesOf(used * parameters.token_bytes, whole * parameters.token_bytes)));
}

export function drawHits(body, { samples, windowS, span, recently, range }) {
  const ever = { rise: (name, labels) => span.last.value(name, labels) };
  body.replaceChildren(
    sourcesRow(recently, "recent", span),
    sourcesRow("since start", "ever", ever),
    chart("Shares of history tokens",
      SOURCES.map(({ kind, rise }) => ({
        name: kind,
        kind,
        points: samples.rate(windowS, (each) => share(rise(each), each.rise(ALL_TOKENS))),
      })),
      { ...range, top: 1, stacked: true, text: percent }));
}

function sourcesRow(title, when, span) {
  const whole = span.rise(ALL_TOKENS);
  const parts = SOURCES.map(({ kind, rise }) => ({ kind, share: share(rise(span), whole) }));
  const text = parts.map((part) => `${part.kind} ${percent(part.share)}`).join(", ");
  return el("div", { class: "sources", "data-when": when },
    el("div", { class: "heading" },
      el("h3", {}, title),
      el("span", { class: "note" }, `${short(whole)} history tokens`)),
    bar(`${title}: ${text}`, parts),
    el("ul", { class: "legend" }, parts.map((part) =>
      el("li", { "data-source": part.kind },
        swatch(part.kind), `${part.kind} `, el("strong", {}, percent(part.share))))));
}

export function drawCopies(body, { samples, windowS, span, recently, range }) {
  const onload = span.rise("onload_seconds_total");
  const hidden = share(span.rise("onload_hidden_seconds_total"), onload);
  const ever = share(
    span.last.value("onload_hidden_seconds_total"), span.last.value("onload_seconds_total"),
  );
  const remark = ever === null
    ? "no onload yet"
    : `${percent(ever)} since start; ${seconds(onload)} of onloads in the ${recently}`;
  body.replaceChildren(
    figure("Onload time that nothing waited for", percent(hidden), remark),
    el("dl", { class: "facts" }, DIRECTIONS.map(({ direction, meaning }) => {
      const flying = span.last.value("copies_in_flight", { direction });
      return el("div", {},
        el("dt", { title: meaning }, swatch(direction), direction),
        el("dd", {}, bytesPerSecond(span.rate("copy_bytes_total", { direction }))),
        el("dd", { class: "note" }, `${number(flying)} in flight`));
    })),
    chart("Bytes copied a second",
      DIRECTIONS.map(({ direction }) => ({
        name: direction, kind: direction,
        points: samples.rate(windowS, (each) => each.rate("copy_bytes_total", { direction })),
      })),
      { ...range, text: bytesPerSecond }));
}

function bytesPerSecond(value) {
  return value === null ? bytes(null) : `${bytes(value)}/s`;
}

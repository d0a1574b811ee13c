// What came of a request: scores, where its history came from, what it cost, or the error.

import { bar, byId, el, scrollable, swatch, table } from "./dom.js";
import { count, percent, score, seconds } from "./format.js";
import { share } from "./samples.js";

const MAX_ROWS = 100;
const MAX_EARLIER = 8;
const SOURCES = ["device", "host", "computed"];

/** The panel beside the form. `onAppend(item)` is called when an item is to join the history. */
export class AnswerPanel {
  #body = byId("answer");
  #earlier = [];
  #onAppend;

  constructor(onAppend) {
    this.#onAppend = onAppend;
  }

  showFailure(error) {
    const { status = null, body = { error: error.message } } = error;
    const facts = [
      ["HTTP status", status], ["code", body.code], ["value", body.value], ["limit", body.limit],
      ["request id", body.request_id],
    ].filter(([, value]) => value !== undefined && value !== null && value !== 0);
    this.#body.replaceChildren(
      el("div", { class: "failure", role: "alert" },
        el("p", {}, body.error),
        el("dl", { class: "facts" }, facts.map(([name, value]) =>
          el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))))),
      this.#earlierList());
  }

  show(answer, { candidates, roundTripS }, scoreNames) {
    const { usage } = answer;
    const rows = scored(answer, candidates);
    this.#body.replaceChildren(
      el("p", { class: "summary", role: "status" }, summary(rows.length, usage, roundTripS)),
      usageBar(usage),
      el("dl", { class: "facts" },
        fact("in the queue", seconds(usage.queue_us / 1e6)),
        fact("waiting for copies", seconds(usage.onload_wait_us / 1e6)),
        fact("in steps", seconds(usage.run_us / 1e6)),
        fact("reuse", usage.reuse),
        fact("weights", usage.weights_version),
        fact("request id", answer.request_id)),
      this.#scores(rows, answer.scores === undefined ? ["score"] : scoreNames),
      this.#earlierList());
    this.#earlier.unshift(usage);
    this.#earlier.length = Math.min(this.#earlier.length, MAX_EARLIER);
  }

  #scores(rows, names) {
    const low = Math.min(0, ...rows.map((row) => row.scores[0]));
    const high = Math.max(0, ...rows.map((row) => row.scores[0]));
    const columns = [
      { title: "#", numeric: true },
      { title: "item", numeric: true },
      { title: "" },
      ...names.map((title) => ({ title, numeric: true })),
      { title: "" },
    ];
    const shown = rows.slice(0, MAX_ROWS).map((row, index) => [
      String(index + 1),
      String(row.item),
      scoreBar(row.scores[0], low, high),
      ...row.scores.map(score),
      el("button", {
        type: "button", class: "quiet small",
        "aria-label": `Append item ${row.item} to the history`,
        on: { click: () => this.#onAppend(String(row.item)) },
      }, "append"),
    ]);
    return el("div", {},
      scrollable("Scores", table("Scores, best first", columns, shown), "scores"),
      rows.length > MAX_ROWS
        ? el("p", { class: "note" }, `The best ${MAX_ROWS} of ${count(rows.length)} are shown.`)
        : null);
  }

  /** The answers before this one, newest first: the hit grows from one to the next. */
  #earlierList() {
    if (this.#earlier.length === 0) return el("div", {});
    return el("div", { class: "earlier" },
      el("h3", {}, "Before"),
      this.#earlier.map((usage) => el("div", { class: "past" },
        usageBar(usage, false), el("span", { class: "note" }, seconds(usage.run_us / 1e6)))));
  }
}

/** [{item, scores}], best first by the first score; of equal ones the order of the answer. */
function scored(answer, candidates) {
  if (answer.scores === undefined) {
    return answer.items.map((item, index) => ({ item, scores: [answer.item_scores[index]] }));
  }
  return answer.scores
    .map((scores, index) => ({ item: candidates[index].rawJSON ?? candidates[index], scores }))
    .sort((one, other) => other.scores[0] - one.scores[0]);
}

function summary(numScores, usage, roundTripS) {
  const reused = usage.history_length - usage.computed_tokens;
  return `${count(numScores)} scores in ${seconds(roundTripS)}; ` +
    `${count(reused)} of ${count(usage.history_length)} history tokens were there already.`;
}

function usageBar(usage, hasLegend = true) {
  const parts = SOURCES.map((kind) => {
    const tokens = usage[`${kind}_tokens`];
    return { kind, tokens, share: share(tokens, usage.history_length) ?? 0 };
  });
  const text = parts.map(({ kind, tokens }) => `${kind} ${count(tokens)}`).join(", ");
  return el("div", { class: "usage" },
    bar(`History tokens: ${text}`, parts),
    hasLegend
      ? el("ul", { class: "legend" }, parts.map(({ kind, tokens, share: part }) =>
        el("li", { "data-source": kind },
          swatch(kind), `${kind} `, el("strong", {}, count(tokens)), ` ${percent(part)}`)))
      : el("span", { class: "note" }, text));
}

/** From the axis at 0 to the value, on the scale [low, high] of all values. */
function scoreBar(value, low, high) {
  const width = high - low || 1;
  return el("div", { class: "score", "aria-hidden": "true" },
    el("span", {
      class: value < 0 ? "below" : "above",
      style: {
        "margin-left": `${(100 * (Math.min(0, value) - low)) / width}%`,
        width: `${(100 * Math.abs(value)) / width}%`,
      },
    }));
}

function fact(name, value) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value));
}

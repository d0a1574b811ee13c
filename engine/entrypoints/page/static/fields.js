// The fields of a request, built from what the model declares. Only their building: what they do is
// in request_form.js.

import { el } from "./dom.js";
import { entries } from "./inputs.js";

export const now = () => Math.floor(Date.now() / 1000);

/**
 * The controls of a form, by the name of what they hold. `history`, `candidates` and `next` have
 * one control for `item` and one for each further feature; `context` is a list.
 *
 * listeners: `onAppend`, `onSample`, `onTask`.
 */
export class Fields {
  rows;
  history = {};
  candidates = {};
  next = {};
  context = [];
  query_time = null;

  constructor(inputs, listeners) {
    this.user_id = input("user_id", { value: "u1" });
    this.namespace = input("namespace", { placeholder: "none" });
    this.task = choice("task", inputs.tasks);
    this.topk = whole("topk", "default");
    this.cache = choice("cache", ["use", "bypass", "refresh"]);
    this.candidatesBlock = this.#events("candidates", "Candidates", inputs.candidates, 3);
    this.rows = [
      row(labelled("User id", this.user_id), labelled("Namespace", this.namespace)),
      row(
        labelled("Task", this.task), labelled("Top k", this.topk), labelled("Cache", this.cache)),
      this.#events("history", "History, oldest first", inputs.history, 4),
      this.#nextEvent(inputs.history, listeners.onAppend),
      this.candidatesBlock,
      inputs.context.length > 0 ? this.#contextRow(inputs.context) : null,
      inputs.readsQueryTime ? this.#timeRow() : null,
      this.#more(),
      this.#buttons(inputs, listeners.onSample),
    ].filter((each) => each !== null);
    this.task.addEventListener("change", listeners.onTask);
  }

  /** Write beside each list how many entries it has. */
  count() {
    for (const field of [...Object.values(this.history), ...Object.values(this.candidates)]) {
      const found = entries(field, Number(field.dataset.width));
      field.parentElement.querySelector("output").textContent = `${found}`;
    }
  }

  /** A list of items, and one more list for each further feature. */
  #events(group, title, features, numRows) {
    const list = (name, label, width) => {
      const field = el("textarea", {
        "data-name": `${group}.${name}`, "data-width": `${width}`, spellcheck: "false",
        rows: `${name === "item" ? numRows : 2}`,
        placeholder: width > 0 ? `${width} numbers a line` : "",
        on: { input: () => this.count() },
      });
      this[group][name] = field;
      return el("label", {}, el("span", { class: "title" }, label, el("output", {})), field);
    };
    return el("div", { class: "events" },
      list("item", `${title}: item ids`, 0),
      features.map(({ name, width }) => list(name, `${group}: ${name}`, width)));
  }

  #nextEvent(features, onAppend) {
    const onEnter = (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // Enter would send the request
      onAppend();
    };
    const field = (name, label) => {
      const placeholder = name === "time" ? "now" : null;
      this.next[name] = input(`next.${name}`, { placeholder, on: { keydown: onEnter } });
      return labelled(label, this.next[name]);
    };
    return row(
      field("item", "Next event: item"),
      ...features.map(({ name }) => field(name, name)),
      quiet("Append event", onAppend));
  }

  #contextRow(names) {
    this.context = names.map((name) => whole(`context.${name}`));
    return row(...names.map((name, index) => labelled(`Context: ${name}`, this.context[index])));
  }

  #timeRow() {
    const setNow = () => {
      this.query_time.value = `${now()}`;
    };
    this.query_time = whole("query_time");
    setNow();
    return row(labelled("Query time, seconds since 1970", this.query_time), quiet("Now", setNow));
  }

  #more() {
    this.exclude_history = el("input", { type: "checkbox", "data-name": "exclude_history" });
    this.excludeRow = el("label", { class: "check" },
      this.exclude_history, "Leave out items of the history");
    this.deadline_ms = input("deadline_ms", { inputmode: "decimal", placeholder: "none" });
    this.priority = whole("priority", "0");
    this.history_start = whole("history_start", "0");
    return el("details", {},
      el("summary", {}, "More"),
      row(
        labelled("Deadline, ms", this.deadline_ms),
        labelled("Priority", this.priority),
        labelled("History start", this.history_start)),
      this.excludeRow);
  }

  #buttons(inputs, onSample) {
    this.submit = el("button", { class: "main" });
    this.note = el("p", { class: "note", role: "status" },
      "Item ids are those of the catalogue that the model was trained with.");
    const sample = inputs.sampleItems.length > 0 ? quiet("Fill with a sample", onSample) : null;
    return el("div", {}, el("div", { class: "buttons" }, this.submit, sample), this.note);
  }
}

function row(...fields) {
  return el("div", { class: "fields" }, fields);
}

function labelled(label, field) {
  return el("label", {}, label, field);
}

function input(name, attributes = {}) {
  const always = { "data-name": name, autocomplete: "off", spellcheck: "false" };
  return el("input", { ...always, ...attributes });
}

function whole(name, placeholder = null) {
  return input(name, { inputmode: "numeric", placeholder });
}

function choice(name, options) {
  return el("select", { "data-name": name }, options.map((each) => el("option", {}, each)));
}

function quiet(text, onClick) {
  return el("button", { type: "button", class: "quiet", on: { click: onClick } }, text);
}

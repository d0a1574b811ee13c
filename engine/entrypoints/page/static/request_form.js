// The form of a request: its fields follow what the loaded model declares.

import { el } from "./dom.js";
import { BadInput, declaredInputs, entries, numbers, optionalNumber, tokens } from "./inputs.js";
import { Failure, post } from "./server.js";

const SAMPLE_EVENTS = 24;
const SAMPLE_CANDIDATES = 16;
const SECONDS_BETWEEN_EVENTS = 600;

const WHERE_IDS_COME_FROM =
  "Item ids are those of the catalogue that the model was trained with " +
  "(the tensor catalogue.item_ids of its model directory).";

const now = () => Math.floor(Date.now() / 1000);

/** Owned by the page. `onAnswer(answer, sent)` and `onFailure(error)` get what came of a request. */
export class RequestForm {
  #form;
  #listeners;
  #fields = {};
  #inputs = null;
  #metadata = "";

  constructor(form, listeners) {
    this.#form = form;
    this.#listeners = listeners;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
  }

  /** Build the fields, unless they are there already for this very metadata. */
  show(metadata) {
    const text = JSON.stringify(metadata);
    if (text === this.#metadata) return;
    this.#metadata = text;
    this.#inputs = declaredInputs(metadata);
    this.#fields = {};
    this.#form.replaceChildren(...this.#rows());
    this.#followTask();
  }

  get scoreNames() {
    return this.#inputs.scoreNames;
  }

  /** Put an event at the end of the history, its further features out of the row of the next event. */
  append(item) {
    const next = this.#fields.next;
    addEntry(this.#fields.history.item, item);
    for (const feature of this.#inputs.history) {
      const value = feature.name === "time" && !next.time.value ? String(now()) : next[feature.name].value;
      addEntry(this.#fields.history[feature.name], value, feature.width > 0 ? "\n" : " ");
    }
    next.item.value = "";
    this.#count();
  }

  // Fields

  #rows() {
    const { history, candidates, context, tasks, readsQueryTime } = this.#inputs;
    const rows = [
      this.#row(
        this.#input("user_id", "User id", { value: "u1" }),
        this.#input("namespace", "Namespace", { placeholder: "none" })),
      this.#row(
        this.#choice("task", "Task", tasks),
        this.#input("topk", "Top k", { inputmode: "numeric", placeholder: "default" }),
        this.#choice("cache", "Cache", ["use", "bypass", "refresh"])),
      this.#events("history", "History, oldest first", history, 4),
      this.#nextEvent(history),
      this.#events("candidates", "Candidates", candidates, 3),
    ];
    if (context.length > 0) {
      rows.push(this.#row(...context.map((name) =>
        this.#input(`context.${name}`, `Context: ${name}`, { inputmode: "numeric" }))));
    }
    this.#fields.context = context.map((name) => this.#fields[`context.${name}`]);
    if (readsQueryTime) {
      rows.push(this.#row(
        this.#input("query_time", "Query time, seconds since 1970", { inputmode: "numeric", value: String(now()) }),
        el("button", {
          type: "button", class: "quiet",
          on: { click: () => { this.#fields.query_time.value = String(now()); } },
        }, "Now")));
    }
    rows.push(el("details", {}, el("summary", {}, "More"),
      this.#row(
        this.#input("deadline_ms", "Deadline, ms", { inputmode: "decimal", placeholder: "none" }),
        this.#input("priority", "Priority", { inputmode: "numeric", placeholder: "0" }),
        this.#input("history_start", "History start", { inputmode: "numeric", placeholder: "0" })),
      this.#fields.excludeRow = this.#check("exclude_history", "Leave out items of the history")));
    rows.push(this.#buttons());
    return rows;
  }

  #row(...fields) {
    return el("div", { class: "fields" }, fields);
  }

  #input(name, label, attributes = {}) {
    const field = el("input", { "data-name": name, autocomplete: "off", spellcheck: "false", ...attributes });
    this.#fields[name] = field;
    return el("label", {}, label, field);
  }

  #choice(name, label, options) {
    const field = el("select", { "data-name": name }, options.map((each) => el("option", {}, each)));
    field.addEventListener("change", () => this.#followTask());
    this.#fields[name] = field;
    return el("label", {}, label, field);
  }

  #check(name, label) {
    const field = el("input", { type: "checkbox", "data-name": name });
    this.#fields[name] = field;
    return el("label", { class: "check" }, field, label);
  }

  /** A list of items, with one more list for each further feature. */
  #events(group, title, features, rows) {
    const area = (name, label, feature) => {
      const field = el("textarea", {
        rows: String(feature ? 2 : rows), spellcheck: "false", "data-name": `${group}.${name}`,
        "data-width": String(feature?.width ?? 0),
        placeholder: feature?.width > 0 ? `${feature.width} numbers a line` : "",
        on: { input: () => this.#count() },
      });
      this.#fields[group][name] = field;
      return el("label", {}, el("span", { class: "title" }, label, el("output", {})), field);
    };
    this.#fields[group] = {};
    const block = el("div", { class: "events", "data-group": group },
      area("item", `${title}: item ids`, null),
      features.map((feature) => area(feature.name, `${group}: ${feature.name}`, feature)));
    this.#fields[`${group}Block`] = block;
    return block;
  }

  #nextEvent(features) {
    this.#fields.next = {};
    const field = (name, label) => {
      const made = el("input", {
        "data-name": `next.${name}`, autocomplete: "off", placeholder: name === "time" ? "now" : null,
        on: {
          keydown: (event) => {
            if (event.key !== "Enter") return;
            event.preventDefault();
            this.#appendNext();
          },
        },
      });
      this.#fields.next[name] = made;
      return el("label", {}, label, made);
    };
    return this.#row(
      field("item", "Next event: item"),
      ...features.map(({ name }) => field(name, name)),
      el("button", { type: "button", class: "quiet", on: { click: () => this.#appendNext() } }, "Append event"));
  }

  #buttons() {
    this.#fields.submit = el("button", { class: "main" }, "Rank");
    const sample = el("button", { type: "button", class: "quiet", on: { click: () => this.#fill() } },
      "Fill with a sample");
    sample.hidden = this.#inputs.sampleItems.length === 0;
    this.#fields.note = el("p", { class: "note", role: "status" }, WHERE_IDS_COME_FROM);
    return el("div", {},
      el("div", { class: "buttons" }, this.#fields.submit, sample), this.#fields.note);
  }

  #followTask() {
    const ranks = this.#fields.task.value === "rank";
    this.#fields.candidatesBlock.hidden = !ranks;
    this.#fields.excludeRow.hidden = ranks;
    this.#fields.submit.textContent = ranks ? "Rank" : "Retrieve";
    this.#count();
  }

  /** Write beside each list how many entries it has. */
  #count() {
    for (const field of this.#form.querySelectorAll("textarea")) {
      const found = entries(field, Number(field.dataset.width));
      field.parentElement.querySelector("output").textContent = `${found}`;
    }
  }

  // What the buttons do

  #appendNext() {
    const [item] = tokens(this.#fields.next.item.value);
    if (item === undefined) {
      this.#fields.next.item.focus();
      return;
    }
    this.append(item);
  }

  async #send() {
    if (this.#fields.submit.disabled) return;
    this.#fields.submit.disabled = true;
    const startedMs = performance.now();
    try {
      const task = this.#fields.task.value;
      const body = this.#body(task);
      const answer = await post(`v1/${task}`, body);
      this.#listeners.onAnswer(answer, {
        candidates: body.candidates?.item, roundTripS: (performance.now() - startedMs) / 1000,
      });
    } catch (error) {
      if (!(error instanceof BadInput || error instanceof Failure)) throw error;
      error.field?.focus();
      this.#listeners.onFailure(error);
    } finally {
      this.#fields.submit.disabled = false;
    }
  }

  /** The request as `/v1/rank` and `/v1/retrieve` take it. Throws BadInput. */
  #body(task) {
    const fields = this.#fields;
    const body = {
      user_id: fields.user_id.value,
      namespace: fields.namespace.value,
      cache: fields.cache.value,
      history: this.#columns("history"),
    };
    if (task === "rank") body.candidates = this.#columns("candidates");
    else if (fields.exclude_history.checked) body.exclude_history = true;
    if (fields.context.length > 0) {
      body.context = fields.context.map((field) => {
        const value = optionalNumber(field);
        if (value === null) throw new BadInput(`${field.dataset.name} is empty: give an integer`, field);
        return value;
      });
    }
    for (const name of ["topk", "query_time", "priority", "history_start"]) {
      const value = fields[name] === undefined ? null : optionalNumber(fields[name]);
      if (value !== null) body[name] = value;
    }
    const deadline = optionalNumber(fields.deadline_ms, true);
    if (deadline !== null) body.deadline_ms = deadline;
    return body;
  }

  #columns(group) {
    const columns = { item: numbers(this.#fields[group].item) };
    for (const feature of this.#inputs[group]) {
      columns[feature.name] = numbers(this.#fields[group][feature.name], feature);
    }
    return columns;
  }

  /** The model names some ids of its catalogue, but no values of its other features: guess those. */
  #fill() {
    const [fields, inputs] = [this.#fields, this.#inputs];
    const items = shuffled(inputs.sampleItems).slice(0, SAMPLE_EVENTS + SAMPLE_CANDIDATES);
    const numEvents = Math.ceil((items.length * SAMPLE_EVENTS) / (SAMPLE_EVENTS + SAMPLE_CANDIDATES));
    fields.user_id.value = `sample-${Math.floor(Math.random() * 1e6)}`;
    for (const field of fields.context) field.value ||= "0";
    if (inputs.readsQueryTime) fields.query_time.value = String(now());
    fill(fields.history, inputs.history, items.slice(0, numEvents));
    fill(fields.candidates, inputs.candidates, items.slice(numEvents));
    fields.next.item.value = String(items.at(-1));
    for (const { name, isFloat, width } of inputs.history) {
      if (name !== "time") fields.next[name].value = filler(isFloat, width);
    }
    const others = [...inputs.history, ...inputs.candidates].filter(({ name }) => name !== "time");
    fields.note.textContent = "The ids are items of the model's catalogue." +
      (others.length + inputs.context.length > 0 ? " The other values are guesses." : "");
    this.#count();
  }
}

function addEntry(field, text, separator = " ") {
  field.value = field.value.trimEnd() === "" ? text : `${field.value.trimEnd()}${separator}${text}`;
  field.scrollTop = field.scrollHeight;
}

function fill(fields, features, items) {
  fields.item.value = items.join(" ");
  const start = now() - items.length * SECONDS_BETWEEN_EVENTS;
  for (const { name, isFloat, width } of features) {
    fields[name].value = items
      .map((_, index) => name === "time" ? start + index * SECONDS_BETWEEN_EVENTS : filler(isFloat, width))
      .join(width > 0 ? "\n" : " ");
  }
}

function filler(isFloat, width) {
  return new Array(width || 1).fill(isFloat ? "0.0" : "1").join(" ");
}

function shuffled(values) {
  const order = [...values];
  for (let last = order.length - 1; last > 0; last -= 1) {
    const other = Math.floor(Math.random() * (last + 1));
    [order[last], order[other]] = [order[other], order[last]];
  }
  return order;
}

// The form of a request: its fields follow the loaded model. Sending it gives an answer or an
// error.

import { Fields, now } from "./fields.js";
import { BadInput, declaredInputs, numbers, optionalNumber, tokens } from "./inputs.js";
import { fillWithSample } from "./sample.js";
import { Failure, post } from "./server.js";

const OPTIONAL_INTEGERS = ["topk", "query_time", "priority", "history_start"];

/** Owned by the page. `onAnswer(answer, sent)` and `onFailure(error)` tell what came of it. */
export class RequestForm {
  #form;
  #listeners;
  #fields;
  #inputs;
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
    this.#fields = new Fields(this.#inputs, {
      onAppend: () => this.#appendNext(),
      onSample: () => {
        fillWithSample(this.#fields, this.#inputs);
        this.#fields.count();
      },
      onTask: () => this.#followTask(),
    });
    this.#form.replaceChildren(...this.#fields.rows);
    this.#followTask();
    this.#fields.count();
  }

  get scoreNames() {
    return this.#inputs.scoreNames;
  }

  /** Put an event at the end of the history; its other features are those of the next event. */
  append(item) {
    const { history, next } = this.#fields;
    addEntry(history.item, item, " ");
    for (const { name, width } of this.#inputs.history) {
      const value = next[name].value || (name === "time" ? `${now()}` : "");
      addEntry(history[name], value, width > 0 ? "\n" : " ");
    }
    next.item.value = "";
    this.#fields.count();
  }

  #appendNext() {
    const [item] = tokens(this.#fields.next.item.value);
    if (item === undefined) this.#fields.next.item.focus();
    else this.append(item);
  }

  #followTask() {
    const ranks = this.#fields.task.value === "rank";
    this.#fields.candidatesBlock.hidden = !ranks;
    this.#fields.excludeRow.hidden = ranks;
    this.#fields.submit.textContent = ranks ? "Rank" : "Retrieve";
  }

  async #send() {
    const { submit, task } = this.#fields;
    if (submit.disabled) return;
    submit.disabled = true;
    try {
      const body = this.#body(task.value);
      const startedMs = performance.now();
      const answer = await post(`v1/${task.value}`, body);
      const roundTripS = (performance.now() - startedMs) / 1000;
      this.#listeners.onAnswer(answer, { candidates: body.candidates?.item, roundTripS });
    } catch (error) {
      if (!(error instanceof BadInput || error instanceof Failure)) throw error;
      error.field?.focus();
      this.#listeners.onFailure(error);
    } finally {
      submit.disabled = false;
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
    if (fields.context.length > 0) body.context = fields.context.map(requiredInteger);
    for (const name of OPTIONAL_INTEGERS) {
      const value = fields[name] === null ? null : optionalNumber(fields[name]);
      if (value !== null) body[name] = value;
    }
    const deadline = optionalNumber(fields.deadline_ms, true);
    if (deadline !== null) body.deadline_ms = deadline;
    return body;
  }

  #columns(group) {
    const controls = this.#fields[group];
    const columns = { item: numbers(controls.item) };
    for (const feature of this.#inputs[group]) {
      columns[feature.name] = numbers(controls[feature.name], feature);
    }
    return columns;
  }
}

function requiredInteger(field) {
  const value = optionalNumber(field);
  if (value === null) throw new BadInput(`${field.dataset.name} is empty: give an integer`, field);
  return value;
}

function addEntry(field, text, separator) {
  const before = field.value.trimEnd();
  field.value = before === "" ? text : `${before}${separator}${text}`;
  field.scrollTop = field.scrollHeight;
}

// Values to begin with. The model names some ids of its catalogue, but not which values its other
// features may have: those are guesses.

import { now } from "./fields.js";

const NUM_EVENTS = 24;
const NUM_CANDIDATES = 16;
const SECONDS_BETWEEN_EVENTS = 600;

/** Fill the fields with a user who has a history, and candidates that are not in it. */
export function fillWithSample(fields, inputs) {
  const items = shuffled(inputs.sampleItems).slice(0, NUM_EVENTS + NUM_CANDIDATES);
  const numEvents = Math.ceil((items.length * NUM_EVENTS) / (NUM_EVENTS + NUM_CANDIDATES));
  fields.user_id.value = `sample-${Math.floor(Math.random() * 1e6)}`;
  for (const field of fields.context) field.value ||= "0";
  if (inputs.readsQueryTime) fields.query_time.value = `${now()}`;
  fill(fields.history, inputs.history, items.slice(0, numEvents));
  fill(fields.candidates, inputs.candidates, items.slice(numEvents));
  fields.next.item.value = `${items.at(-1)}`;
  for (const feature of inputs.history) {
    if (feature.name !== "time") fields.next[feature.name].value = guess(feature);
  }
  const others = [...inputs.history, ...inputs.candidates].filter(({ name }) => name !== "time");
  fields.note.textContent = "The ids are items of the model's catalogue." +
    (others.length + inputs.context.length > 0 ? " The other values are guesses." : "");
}

function fill(controls, features, items) {
  controls.item.value = items.join(" ");
  const start = now() - items.length * SECONDS_BETWEEN_EVENTS;
  for (const feature of features) {
    const values = items.map((_, index) =>
      feature.name === "time" ? start + index * SECONDS_BETWEEN_EVENTS : guess(feature));
    controls[feature.name].value = values.join(feature.width > 0 ? "\n" : " ");
  }
}

function guess({ isFloat, width }) {
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
